"""What of the memory adaptor can be tried without a GPU."""

from __future__ import annotations

import array

import pytest

torch = pytest.importorskip("torch")

from salus.adaptors import torch_memory  # noqa: E402
from salus.adaptors.captures import Captures  # noqa: E402
from salus.adaptors.torch_memory import Known, Live, gpu_uuid  # noqa: E402
from salus.client.arena import LEFT, PASSED, STAYS  # noqa: E402

MIB = 1 << 20


def segment(address: int, *blocks: tuple[str, int]) -> dict:
    active = sum(size for state, size in blocks if state != "inactive")
    listed = [{"state": state, "size": size} for state, size in blocks]
    total = sum(size for _, size in blocks)
    return {"address": address, "active_size": active, "total_size": total, "blocks": listed}


def test_what_is_in_use_is_found_with_its_address():
    snapshot = [
        segment(1000, ("inactive", 100), ("active_allocated", 50), ("inactive", 10), ("active_allocated", 5)),
        segment(5000, ("inactive", 900)),
    ]
    assert Live.of(snapshot) == ({1100: 50, 1160: 5}, False, True)


def test_a_block_that_waits_for_another_stream_is_in_use_and_said_so():
    assert Live.of([segment(0, ("active_pending_free", 8))]) == ({0: 8}, True, True)


@pytest.mark.parametrize(
    ("blocks", "sealed"),
    [
        ((("active_allocated", MIB), ("inactive", MIB)), True),
        ((("active_allocated", MIB), ("inactive", 19 * MIB)), False),
        ((("inactive", 19 * MIB), ("active_allocated", MIB)), True),
        ((("active_allocated", MIB), ("inactive", 18 * MIB), ("active_allocated", MIB)), False),
    ],
)
def test_a_block_that_could_be_longer_next_time_is_not_known_by_its_address_alone(blocks, sealed):
    live = Live.of([segment(0, *blocks)])
    assert live.sealed == sealed
    known = Known()
    known.find(1, lambda _: True)
    known.add(live, array.array("Q"))
    assert (known.find(1, lambda _: True) is not None) == sealed


class Pool:
    """Says what torch would; counts how often it is asked."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.asked = 0

    def lives(self, addresses: set[int]) -> bool:
        self.asked += 1
        return addresses == self.alive

    def live(self) -> Live:
        return Live(dict.fromkeys(self.alive, 8), False, True)


def test_a_set_that_was_seen_before_is_found_again_without_a_snapshot():
    known, pool = Known(), Pool()
    for alive in ({1}, {2}, {1}, {2}, {1, 2}):
        pool.alive = alive
        if known.find(7, pool.lives) is None:
            known.add(pool.live(), array.array("Q", sorted(alive)))
    pool.alive = {1}
    assert list(known.find(7, pool.lives) or []) == [1]
    pool.asked = 0
    assert known.find(7, pool.lives) is not None and pool.asked == 1, "what was found last is asked for first"
    pool.alive = {3}
    assert known.find(7, pool.lives) is None


def test_what_was_known_is_forgotten_when_the_segments_change_and_pending_is_never_known():
    known, pool = Known(), Pool()
    assert known.find(1, pool.lives) is None
    known.add(pool.live(), array.array("Q"))
    assert known.find(1, pool.lives) is not None
    assert known.find(2, pool.lives) is None and known.find(1, pool.lives) is None
    known.add(Live({}, True, True), array.array("Q"))
    assert known.find(1, pool.lives) is None


def test_few_sets_are_kept():
    known, pool = Known(), Pool()
    known.find(1, pool.lives)
    for number in range(10):
        known.add(Live({number: 8}, False, True), array.array("Q"))
    pool.alive, pool.asked = {0}, 0
    assert known.find(1, pool.lives) is None and pool.asked == Known.MOST


def test_a_gpu_is_known_by_its_uuid_however_torch_writes_it():
    class Properties:
        uuid = "1234-5678"

    assert gpu_uuid(Properties()) == "GPU-1234-5678"
    assert gpu_uuid(object()) is None


class Torch:
    """Torch's private calls, which note where allocations go."""

    def __init__(self) -> None:
        self.goes_to: list[str] = []

    def _cuda_beginAllocateToPool(self, device: int, pool: str) -> None:
        assert not self.goes_to
        self.goes_to.append(pool)

    def _cuda_endAllocateToPool(self, device: int, pool: str) -> None:
        assert self.goes_to.pop() == pool

    def _cuda_releasePool(self, device: int, pool: str) -> None:
        pass


class Lane:
    """An arena of which it can be said how the lane is left."""

    def __init__(self, torch: Torch) -> None:
        self._torch = torch
        self.leaves = LEFT
        self.when = [1, 2, 3, 4]
        self.went_to: list[list[str]] = []
        self.captures = 0

    def segments(self) -> int:
        return 1

    def capture_began(self) -> None:
        self.captures += 1
        assert not self._torch.goes_to, "a capture has its own pool"

    def capture_ended(self) -> None:
        self.captures -= 1

    def leave(self, *_: object) -> int:
        self.went_to.append(list(self._torch.goes_to))
        return self.leaves


@pytest.fixture
def sorting(monkeypatch):
    fake = Torch()
    monkeypatch.setattr(torch_memory, "_C", fake)
    memory = torch_memory.TorchMemory(None)  # type: ignore[arg-type]
    memory._device = 0
    memory._private, memory._lane = (torch_memory.Pool(None, name) for name in ("private", "lane"))
    memory._arena = Lane(fake)  # type: ignore[assignment]
    memory._live = array.array("Q").__copy__  # type: ignore[method-assign]
    memory._route(memory._private)
    memory.active = True
    return memory, fake


@pytest.mark.parametrize("left", [LEFT, PASSED, STAYS])
def test_a_lane_is_left_after_allocations_have_gone_elsewhere_and_only_one_that_is_kept_is_stayed_in(sorting, left):
    memory, fake = sorting
    assert memory.stay() and memory.stays and fake.goes_to == ["lane"]
    memory._arena.leaves = left
    assert memory.leave(0, 0, True)[0] == left
    assert memory._arena.went_to == [["private"]]
    assert memory.stays == (left == STAYS) and fake.goes_to == (["lane"] if left == STAYS else ["private"])


def test_what_cannot_be_sorted_does_not_stay_in_a_lane(sorting):
    memory, fake = sorting
    memory.active = False
    assert not memory.stay() and fake.goes_to == ["private"]


def test_who_rests_between_iterations_allocates_its_own(sorting):
    memory, fake = sorting

    class Between:
        def between_iterations(self, do):
            do()

    memory._lease = Between()
    memory.stay()
    memory.rest()
    assert not memory.stays and fake.goes_to == ["private"]


class Graph:
    """As torch's, where a test does something within the capture."""

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass


@pytest.fixture
def captured(sorting):
    """A job between iterations, with graphs that are seen when they are captured."""
    memory, fake = sorting
    turns = Turns()
    memory.captures = Captures(turns, memory)

    class Seen(Graph):
        pass

    memory.captures.install(Seen)
    return memory, fake, turns, torch_memory.RoutedLease(turns, memory), Seen()


@pytest.mark.parametrize("within", [False, True])
def test_within_a_capture_torch_allocates_where_it_would_without_salus(captured, within):
    memory, fake, _turns, routed, graph = captured
    if within:
        routed.begin()
    before = list(fake.goes_to)
    assert before == (["lane"] if within else ["private"])
    graph.capture_begin()
    assert fake.goes_to == [] and memory._arena.captures == 1
    memory.first_step_began()
    memory.first_step_ended()
    assert fake.goes_to == [], "the first step of an optimizer does not change that"
    graph.capture_end()
    assert memory._arena.captures == 0 and fake.goes_to != []


def test_after_a_capture_allocations_go_where_they_went_before_it(captured):
    _memory, fake, _turns, routed, graph = captured
    for goes_to in ("private", "lane"):
        graph.capture_begin()
        graph.capture_end()
        assert fake.goes_to == [goes_to]
        if goes_to == "private":
            routed.begin()


def test_an_iteration_that_ended_within_a_capture_leaves_its_lane(captured):
    _memory, fake, turns, routed, graph = captured
    routed.begin()
    graph.capture_begin()
    routed.end()
    assert turns.calls == ["begin"] and fake.goes_to == []
    graph.capture_end()
    assert turns.calls == ["begin", "end 1"] and fake.goes_to == ["private"]


def test_a_lane_is_not_left_within_a_capture_and_torch_is_not_asked_what_lives_there(captured):
    memory, _fake, _turns, _routed, graph = captured
    graph.capture_begin()
    memory._live = pytest.fail
    assert memory.leave(0, 0, True) == (STAYS, 0) and memory._arena.went_to == []
    graph.capture_end()


def test_within_a_capture_iterations_do_not_take_the_short_way(captured):
    memory, _fake, _turns, routed, graph = captured
    graph.capture_begin()
    assert routed.usual() is None and routed.run_on(int) is None
    graph.capture_end()
    assert memory.captures.under_way is False


# What cannot be sorted gets one line, and the job takes its turns.


class Turns:
    """A lease that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, memory: object) -> bool:
        self.calls.append("attach")
        return True

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self, iterations: int = 1) -> None:
        self.calls.append(f"end {iterations}")

    def goes_on(self) -> None:
        pass

    def is_iterating(self) -> bool:
        return self.calls[-1:] == ["begin"]


def begins_to_use_the_gpu(monkeypatch, **of_cuda: object) -> tuple[torch_memory.TorchMemory, Turns]:
    """A job whose script has just touched the GPU, with this of `torch.cuda`'s."""
    monkeypatch.setattr(torch_memory._cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_memory._cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_memory._cuda, "_lazy_call", lambda call: call())
    # (What is wrapped of this class is wrapped for good.)
    monkeypatch.setattr(torch_memory._cuda, "CUDAGraph", type("CUDAGraph", (torch.cuda.CUDAGraph,), {}))
    for name, value in of_cuda.items():
        monkeypatch.setattr(torch_memory._cuda, name, value)
    for name in torch_memory._Torch.NEEDED:
        monkeypatch.setattr(torch_memory._C, name, lambda *_: None, raising=False)
    turns = Turns()
    return torch_memory.TorchMemory(turns), turns  # type: ignore[arg-type]


def expect_turns_and_one_line(capsys, memory: torch_memory.TorchMemory, turns: Turns, line: str) -> None:
    routed = torch_memory.RoutedLease(turns, memory)  # type: ignore[arg-type]
    routed.begin()
    routed.end()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"salus: {line}\n")
    assert not memory.active and memory.gpu_is_used
    assert turns.calls[-2:] == ["begin", "end 1"]


def test_a_torch_that_is_too_old_gets_turns(monkeypatch, capsys):
    memory, turns = begins_to_use_the_gpu(monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu128")
    memory.install()
    line = "torch 2.8.1+cu128 is older than 2.9; this job shares the GPU by turns, not its memory"
    expect_turns_and_one_line(capsys, memory, turns, line)


def test_a_torch_without_a_private_call_gets_turns(monkeypatch, capsys):
    memory, turns = begins_to_use_the_gpu(monkeypatch)
    monkeypatch.delattr(torch_memory._C, "_cuda_releasePool")
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    memory.install()
    line = "torch 9.0.0 lacks _cuda_releasePool; this job shares the GPU by turns, not its memory"
    expect_turns_and_one_line(capsys, memory, turns, line)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["backend:cudaMallocAsync", "max_split_size_mb:64,expandable_segments:True"])
def test_settings_that_ask_for_another_allocator_get_turns(monkeypatch, capsys, name, value):
    memory, turns = begins_to_use_the_gpu(monkeypatch)
    monkeypatch.setenv(name, value)
    memory.install()
    line = f"{name} asks for another allocator ({value}); this job shares the GPU by turns, not its memory"
    expect_turns_and_one_line(capsys, memory, turns, line)


def test_other_settings_are_left_to_torch(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False")
    begins_to_use_the_gpu(monkeypatch)
    assert torch_memory._Torch.why_not() is None


def test_a_script_that_brings_its_own_allocator_gets_turns(monkeypatch, capsys):
    memory, turns = begins_to_use_the_gpu(monkeypatch, get_allocator_backend=lambda: "pluggable")
    memory.install()
    line = "the script brings an allocator of its own (pluggable); it shares the GPU by turns, not its memory"
    expect_turns_and_one_line(capsys, memory, turns, line)


def test_whatever_torch_raises_the_job_gets_turns(monkeypatch, capsys):
    def fails() -> str:
        raise RuntimeError("not today")

    memory, turns = begins_to_use_the_gpu(monkeypatch, get_allocator_backend=fails)
    memory.install()
    line = "memory cannot be shared (RuntimeError: not today); this job shares the GPU by turns"
    expect_turns_and_one_line(capsys, memory, turns, line)
