"""Drivers that cannot do what the arena needs, made up here: the job says one line, and takes its turns."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.harness import SOURCE, finish

DRIVER = """
#define IS(name) int name(void) { return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = CAN; return 0; }
IS(cuDeviceGet) IS(cuDevicePrimaryCtxRetain) IS(cuCtxGetCurrent) IS(cuCtxPushCurrent_v2) IS(cuCtxPopCurrent_v2)
IS(cuMemAddressReserve) IS(cuMemAddressFree) IS(cuMemRelease) IS(cuMemMap) IS(cuMemUnmap) IS(cuMemSetAccess)
IS(cuMemExportToShareableHandle) IS(cuMemImportFromShareableHandle) IS(cuMemsetD32_v2) IS(cuCtxSynchronize)
IS(cuStreamCreate) IS(cuStreamSynchronize) IS(cuMemcpyDtoDAsync_v2)
#ifndef OLD
IS(cuMemCreate)
#endif
"""

JOB = """
import sys
sys.path.insert(0, sys.argv[1])
from salus.client.arena import Arena
from salus.client.lease import of_this_process

class Gpu:
    def open(self, page_address, channel):
        Arena().open("cuda", 0, page_address, channel)

lease = of_this_process()
assert not lease.attach(Gpu()), "there is no arena"
for _ in range(20):
    lease.begin()
    lease.end()
print("finished")
"""


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def build(folder: Path, *options: str) -> Path:
    source = folder / "driver.c"
    source.write_text(DRIVER)
    output = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", *options, "-o", str(output), str(source)], check=True)
    return folder


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-DINIT=0", "-DCAN=1", "-DOLD"], "the driver is too old: it has no virtual memory management"),
        (["-DINIT=0", "-DCAN=0"], "this GPU cannot share physical memory between processes"),
        (["-DINIT=100", "-DCAN=1"], "the driver finds no GPU"),
        pytest.param(
            None, "there is no libcuda.so.1", marks=pytest.mark.skipif(has_driver(), reason="there is a driver here")
        ),
    ],
    ids=["too old", "cannot", "no GPU", "no driver"],
)
def test_a_driver_that_cannot_share_memory_is_one_line_and_the_job_takes_its_turns(serve, tmp_path, options, why):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "1GiB")
    service.environment["LD_LIBRARY_PATH"] = str(tmp_path if options is None else build(tmp_path, *options))
    script = tmp_path / "job.py"
    script.write_text(JOB)
    beside = service.job("--name", "beside", iterations=50, seconds=0.005)
    job = service.salus_in_background("run", "--name", "j", "--", sys.executable, str(script), str(SOURCE))
    output, errors = job.communicate(timeout=60)
    assert (job.returncode, output) == (0, "finished\n"), errors
    row = service.jobs()["j"]
    lines = [line for line in errors.splitlines() if why in line]
    line = f"salus: memory cannot be shared: {why}; job {row['id']} shares the device by turns, in a lane of its own"
    assert lines == [line]
    assert row["iterations"] == 20
    finish(beside)
