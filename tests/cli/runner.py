"""Runs many commands of `salus` quickly: each in a fork of one interpreter that has imported everything.

Standard input is a JSON list of cases, standard output one of results. What the interpreter does for a process at its
beginning and its end (standard streams, a traceback, the last flush) is done here for each fork.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

LIMIT_S = 60.0


def import_everything() -> None:
    """Another user may not be able to read the interpreter's files, so what is imported late is needed now."""
    import encodings.idna  # noqa: F401

    import salus.service.server  # noqa: F401
    from salus.cli.main import app

    with contextlib.redirect_stdout(io.StringIO()):
        app(["simulate", "--generate", "1"], standalone_mode=False)
        app(["doctor"], standalone_mode=False)
        app(["install-service", "--user", "--print"], standalone_mode=False)


def run(case: dict[str, Any]) -> dict[str, Any]:
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        os.close(err)
        os.setsid()
        os._exit(_in_fork(case, out_end, err_end))
    os.close(out_end)
    os.close(err_end)
    pidfd = os.pidfd_open(pid)
    written: dict[int, bytes] = {out: b"", err: b""}
    deadline = time.monotonic() + LIMIT_S
    poll = select.poll()
    for descriptor in (pidfd, out, err):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    ended = False
    while not ended:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        for descriptor, _ in poll.poll(1000):
            if descriptor == pidfd:
                ended = True
            elif piece := os.read(descriptor, 1 << 16):
                written[descriptor] += piece
            else:
                poll.unregister(descriptor)
    for descriptor in (out, err):
        # Something that was started in the background may keep the pipe open.
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(descriptor, 1 << 16):
                written[descriptor] += piece
        os.close(descriptor)
    os.close(pidfd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {
        "status": status,
        "out": written[out].decode(errors="replace"),
        "err": written[err].decode(),
    }


def _in_fork(case: dict[str, Any], out: int, err: int) -> int:
    if case["stdout"] == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(case["environment"])
    os.chdir(case["directory"])
    if case["deleted"]:
        with tempfile.TemporaryDirectory() as gone:
            os.chdir(gone)
    if case["uid"]:
        os.setgroups([])
        os.setgid(case["uid"])
        os.setuid(case["uid"])
    sys.argv = ["salus", *case["arguments"]]
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", write_through=True
    )
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), case["encoding"], "strict")
    if case["stdout"] == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]
    status = 0
    try:
        from salus.cli.main import main

        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        print("Exception ignored in: stdout", file=sys.stderr)
        status = 120
    return status


if __name__ == "__main__":
    import_everything()
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
