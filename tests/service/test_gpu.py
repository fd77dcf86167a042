"""Which GPU is meant, without one: names, numbers and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import asyncio

import pytest

from salus.core.model import GpuConfig
from salus.errors import RequestRejected
from salus.plugins import load_policy
from salus.protocol import messages as msg
from salus.registry import Registry
from salus.service.devices import Device
from salus.service.gpu import Gpu, Nvml, _visible, choose
from salus.service.history import History, PastRun
from salus.service.job import LiveJob
from salus.service.live import Live
from salus.service.sizes import CONTEXT_BYTES

GIB = 1 << 30
SMALL = Gpu("GPU-aaaa", 0, "small", 8 * GIB, 1 * GIB)
LARGE = Gpu("GPU-bbbb", 1, "large", 80 * GIB, 79 * GIB)
FREE = Gpu("GPU-cccc", 2, "free", 40 * GIB, 2 * GIB)


def test_the_one_with_the_most_free_memory_is_taken_unless_another_is_named():
    assert choose([SMALL, LARGE, FREE], None) is FREE
    assert choose([SMALL, LARGE, FREE], "1") is LARGE
    assert choose([SMALL, LARGE, FREE], "GPU-aaaa") is SMALL
    assert choose([], None) is None


def test_one_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(RequestRejected, match=r"there is no GPU 7; there are: 0 \(GPU-aaaa\)"):
        choose([SMALL], "7")


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [SMALL, LARGE, FREE]),
        ("", []),
        ("2,0", [FREE, SMALL]),
        ("GPU-bb", [LARGE]),
        ("1,9,0", [LARGE]),
        ("-1", []),
    ],
)
def test_what_cuda_visible_devices_hides_does_not_exist(setting, shown):
    assert _visible([SMALL, LARGE, FREE], setting) == shown


def test_without_a_driver_there_is_no_gpu_and_no_error():
    nvml = Nvml()
    if nvml._nvml is not None:
        pytest.skip("this machine has a driver")
    assert nvml.gpus() == []
    assert nvml.used_by(SMALL) == {}


def test_internal_memory_counts_when_it_was_seen_twice_in_a_row():
    job = LiveJob("1", "token", 0, msg.Register("job", ["python"], "/"), "key", 0.0, launcher=None, live=None)  # type: ignore[arg-type]
    seen = [job.has_again(found, GIB // 8) for found in (GIB // 2, 3 * GIB, GIB // 2, GIB // 2 + 1)]
    assert seen == [False, False, False, True], "the one in the middle was half of a switch"


def test_what_the_driver_takes_for_a_process_is_kept_for_it_before_it_has_been_seen(tmp_path):
    async def expected(gpu: Gpu | None, capacity_bytes: int) -> int:
        device = Device(GpuConfig(capacity_bytes), gpu)
        history = History(tmp_path / "history.db")
        live = Live(device, load_policy("fair"), None, history, Registry(tmp_path / "jobs.db"), lambda: None)
        asked = msg.Register("job", ["python"], "/", persistent_bytes=2 * GIB, ephemeral_bytes=4 * GIB)
        return live.sizes.expected(asked, "key").internal_bytes

    assert asyncio.run(expected(LARGE, 80 * GIB)) == CONTEXT_BYTES
    assert asyncio.run(expected(LARGE, 6 * GIB + 1)) == 1, "what could run is not refused for a guess"
    assert asyncio.run(expected(None, 80 * GIB)) == 0, "the processor's memory is not the device's"


def test_what_a_process_takes_of_a_gpu_is_remembered_but_not_of_one_whose_memory_could_not_be_sorted(tmp_path):
    history = History(tmp_path / "history.sqlite")
    assert history.last_internal_bytes(2 * GIB) is None
    history.add("sorted", "a", 0, PastRun(10, 1.0, GIB, GIB, 700 << 20))
    history.add("not sorted", "b", 0, PastRun(10, 1.0, 0, 0, 12 * GIB))
    assert history.last_internal_bytes(2 * GIB) == 700 << 20
    history.close()
