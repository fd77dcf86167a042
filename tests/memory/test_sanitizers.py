"""The C code under sanitizers: addresses and undefined behaviour with real jobs, threads with a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.memory.test_lanes_across_processes import finish, start
from tests.service.harness import Service

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SOURCES = [str(path) for path in sorted(CSRC.glob("*.c"))]
FLAGS = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]


def build(output: Path, *options: str) -> Path:
    subprocess.run(["cc", *FLAGS, *options, "-o", str(output), "-ldl", "-lpthread"], check=True, cwd=CSRC)
    return output


def runtime(name: str) -> str:
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_jobs_that_share_a_lane_touch_no_address_they_should_not(tmp_path):
    options = ("-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *SOURCES)
    library = build(tmp_path / "checked.so", *options)
    service = Service(tmp_path, "--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    checked = {
        "SALUS_TEST_ARENA": str(library),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # Python itself leaks on purpose, and so does a process that ends in a hurry.
        "ASAN_OPTIONS": "detect_leaks=0,abort_on_error=1",
    }
    prefix = ["env", *(f"{key}={value}" for key, value in checked.items())]
    try:
        memory = ("--persistent", "100MiB", "--ephemeral", "200MiB")
        leases = finish(service, *(start(service, f"j{seed}", 80, seed, *memory, prefix=prefix) for seed in (1, 2, 3)))
        assert min(leases) > 20
    finally:
        service.stop()


LENDING = """
import sys
from pathlib import Path
import pytest
from salus.client import arena

arena.LIBRARY = Path(sys.argv[1])
arena.Arena.__init__.__defaults__ = (arena.LIBRARY,)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-s", "-k", "not killed", sys.argv[2]]))
"""


def test_what_is_lent_and_borrowed_touches_no_address_it_should_not(tmp_path):
    options = ("-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *SOURCES)
    library = build(tmp_path / "checked.so", *options)
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0,abort_on_error=1",
        "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent / "src"), str(HERE.parent.parent))),
    }
    done = subprocess.run(
        [sys.executable, "-c", LENDING, str(library), str(HERE / "test_lending.py")],
        env=environment, cwd=HERE.parent.parent, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_threads_that_wait_for_memory_do_not_race(tmp_path):
    options = ("-fsanitize=thread", f"-I{CSRC}", str(HERE / "threads.c"), *SOURCES)
    program = build(tmp_path / "threads", *options)
    # The sanitizer needs a layout of the address space that some kernels randomize too far for it.
    command = ["setarch", "--addr-no-randomize", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr[-3000:]
