"""MPS without a GPU: the daemon is played by a script."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from salus.client.environment import environment_for
from salus.core.model import GpuConfig
from salus.plugins import load_policy
from salus.protocol import messages as msg
from salus.registry import Registry
from salus.service.devices import Device
from salus.service.history import History
from salus.service.job import LiveJob
from salus.service.live import Live
from salus.service.mps import CONTROL, Mps, MpsUnavailable

PLAYED = """#!/bin/sh
if [ "$1" = "-d" ]; then
    [ -n "$MPS_FAILS" ] && { echo "no permission" >&2; exit 1; }
    echo "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_PIPE_DIRECTORY/alive"
    exit 0
fi
[ -e "$CUDA_MPS_PIPE_DIRECTORY/alive" ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
read command
[ "$command" = quit ] && rm "$CUDA_MPS_PIPE_DIRECTORY/alive"
echo 100.0
"""
FAULT = """\
[2026-11-15 19:15:42.279 Server   815] Client {PID: 783, Context: 1} encountered a fatal GPU error.
[2026-11-15 19:15:42.279 Server   815] The following devices will be reset:
[2026-11-15 19:15:42.279 Server   815] 0
[2026-11-15 19:15:42.279 Server   815] The following client process have a sticky error set:
[2026-11-15 19:15:42.279 Server   815] 783
[2026-11-15 19:15:42.279 Server   815] 848
"""
AFTER = "[2026-11-15 19:15:42.653 Server   815] Client process 848 disconnected\n"


@pytest.fixture
def played(tmp_path, monkeypatch) -> Path:
    """A control program, first on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / CONTROL).write_text(PLAYED)
    (programs / CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "mps"


def test_a_daemon_is_started_for_one_gpu_and_found_again_by_the_next_service(played, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/elses")
    mps = Mps(played, "GPU-1")
    assert not mps.is_alive()
    mps.start()
    assert mps.is_alive() and (mps.pipe / "alive").read_text() == "GPU-1\n"
    again = Mps(played, "GPU-2")
    again.start()
    assert (mps.pipe / "alive").read_text() == "GPU-1\n", "it was not started twice"
    again.stop()
    assert not _soon(lambda: mps.is_alive())
    mps.stop()


def _soon(condition) -> bool:
    for _ in range(100):
        if not condition():
            return False
        asyncio.run(asyncio.sleep(0.02))
    return True


def test_where_it_does_not_start_or_is_not_there_it_says_why_in_a_line(played, monkeypatch, tmp_path):
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(MpsUnavailable, match="does not start: no permission"):
        Mps(played, "GPU-1").start()
    with pytest.raises(MpsUnavailable, match="too long for a socket"):
        Mps(tmp_path / ("x" * 100), "GPU-1").start()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("salus.service.mps.PLACES", ())
    with pytest.raises(MpsUnavailable, match="is not there"):
        Mps(played, "GPU-1").start()


def test_a_fault_is_read_off_the_log_once_and_whole(played):
    mps = Mps(played, "GPU-1")
    log = played / "log" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text(FAULT)
    mps.start()
    assert mps.lost() == set(), "what was there before is no news"
    half = len(FAULT) - 40
    with log.open("a") as file:
        file.write(FAULT[:half])
        file.flush()
        assert mps.lost() == set()
        file.write(FAULT[half:] + AFTER)
        file.flush()
        assert mps.lost() == set(), "it may still be writing"
        assert mps.lost() == {783, 848}
        assert mps.lost() == set()
    log.write_text(FAULT)
    mps.lost()
    assert mps.lost() == {783, 848}, "a log that was begun anew is read from its beginning"


def test_whoever_dies_of_a_fault_is_told_of_the_others(tmp_path):
    async def lost(pids: set[int]) -> list[str | None]:
        device = Device(GpuConfig(1 << 30))
        history, registry = History(tmp_path / "history.db"), Registry(tmp_path / "jobs.db")
        live = Live(device, load_policy("fair"), None, history, registry, lambda: None)
        for number in (1, 2, 3):
            asked = msg.Register(f"job{number}", ["python"], "/")
            live.jobs[str(number)] = LiveJob(str(number), "token", 0, asked, "key", 0.0, None, live)
            live.jobs[str(number)].last_pid = 100 + number
        live.lost_together(pids)
        return [job.fault for job in live.jobs.values()]

    both = asyncio.run(lost({101, 103, 999}))
    assert both[0] is not None and "together with job 3, under MPS" in both[0]
    assert both[1] is None
    assert asyncio.run(lost({102}))[1] == "it made a fatal fault on the GPU"


def test_jobs_join_the_daemon_of_their_service_and_no_other():
    base = {"CUDA_MPS_PIPE_DIRECTORY": "/mine"}
    joins = environment_for(msg.Registered("1", "t", "GPU-1", "/pipe", 25, 1), base)
    assert joins["CUDA_MPS_PIPE_DIRECTORY"] == "/pipe"
    assert joins["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25" and joins["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    plain = environment_for(msg.Registered("1", "t", "GPU-1", None, 25), base)
    assert plain["CUDA_MPS_PIPE_DIRECTORY"] == "/mine" and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in plain


def test_what_the_command_line_says_about_it(serve):
    service = serve(start=False)
    done = service.salus("serve", "--device", "host", "--mps", "on")
    assert done.returncode == 2 and "--mps: there is no GPU" in done.stderr
    done = service.salus("serve", "--mps", "perhaps")
    assert done.returncode == 2 and "--mps: 'perhaps' is not understood; expected off, auto or on" in done.stderr
    done = service.salus("serve", "--mps", "on", "--users", "all")
    assert done.returncode == 2 and "one user at a time" in done.stderr
    service.start()
    done = service.salus("run", "--sm-share", "25", "--", "true")
    assert done.returncode == 0 and "--sm-share has no effect" in done.stderr
