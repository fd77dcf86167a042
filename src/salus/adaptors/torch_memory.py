"""Sorts the memory of a PyTorch script on the GPU: what is allocated within an iteration goes to the lane, the rest to
the job itself.

Two MemPools, whose segments the arena (csrc/) cuts. Between iterations every thread allocates from the private pool,
within one from the lane's; so an allocation costs what it always does. The first step of an optimizer makes its state,
which stays: it is sent to the private pool as well. What else is alive in the lane when the job is switched out
(gradients that the script keeps, a hidden state, a list of losses, cuBLAS's workspace) the arena makes private, slot by
slot.

Left alone: CUDA graphs and their pools, which torch allocates elsewhere; they count as internal memory.

All private calls of torch are in `_Torch` and `TorchMemory._route`. If one is missing, lane sharing is off for this
job, which is said once; it still takes its turns. Nothing here raises into the script.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from salus.adaptors import iterations, torch_sharing
from salus.adaptors.blocks import Known, Live
from salus.adaptors.captures import Captures
from salus.client.arena import LEFT, PASSED, STAYS, Arena, ranges
from salus.client.lease import WHERE_IT_WAITS, Lease, Usual
from salus.client.lending import Lender
from salus.client.say import say
from salus.client.turns import Turn
from salus.errors import SalusError

OLDEST = (2, 9)
BRING_BACK_S = 0.005
_cuda: Any = torch.cuda
_C: Any = torch._C


class Pool(NamedTuple):
    torch: Any
    id: Any
    """Asked for once: allocations change pools twice an iteration."""


class _Torch:
    """What torch has and does not promise."""

    NEEDED = (
        "_cuda_customAllocator",
        "_cuda_beginAllocateToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    )

    @staticmethod
    def why_not() -> str | None:
        """Why memory cannot be sorted with this torch, or with how it was set up."""
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if version < OLDEST:
            return f"torch {torch.__version__} is older than 2.9"
        missing = [name for name in _Torch.NEEDED if not hasattr(_C, name)]
        if missing or not hasattr(_cuda, "MemPool") or not hasattr(_cuda, "_lazy_call"):
            return f"torch {torch.__version__} lacks {', '.join(missing) or 'MemPool'}"
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            settings = os.environ.get(name, "")
            if "cudaMallocAsync" in settings or "expandable_segments:True" in settings:
                return f"{name} asks for another allocator ({settings})"
        return None

    lives: Callable[[int, Any, set[int]], bool] = staticmethod(
        getattr(_C, "_cuda_checkPoolLiveAllocations", lambda *_: False)
    )
    """Whether exactly these are in use. What was freed and waits for another stream does not count."""

    @staticmethod
    def snapshot(pool: Pool) -> Any:
        try:
            return pool.torch.snapshot(include_traces=False)
        except TypeError:
            return pool.torch.snapshot()


def gpu_uuid(properties: Any) -> str | None:
    """As the driver and NVML write it, where this torch knows it."""
    uuid = str(getattr(properties, "uuid", "") or "")
    return None if not uuid else uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class TorchMemory:
    """The job's memory on its GPU. A `Memory` for the lease, and told by the adaptor where iterations begin and end."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.active = False
        """The script uses the GPU, and its memory is sorted."""
        self.gpu_is_used = True
        """Or may be, for all that is known."""
        self._poison = os.environ.get("SALUS_POISON") == "1"
        self._routed: Pool | None = None
        """The pool that allocations go to. Changed by whoever iterates, or between iterations with the lease's lock."""
        self._meant: Pool | None = None
        """The pool that they go to after the capture that is under way."""
        self.stays = False
        self.captures = Captures(lease, self)
        self.on_first_use: Callable[[], None] | None = None
        """Called when the script first uses the GPU."""
        self._lender: Lender | None = None
        self._known = Known()
        self._trace: list[tuple[str, int]] | None = [] if os.environ.get("SALUS_TRACE") else None
        """When each step of a hand-over was done, for benchmarks; their order is in bench/switch_gpu.py."""
        if self._trace is not None:
            atexit.register(self._write_trace)

    def install(self) -> None:
        """Waits until the script uses the GPU."""
        torch_sharing.install()
        why_not = _Torch.why_not()
        if why_not is not None:
            self.gpu_is_used = bool(_cuda.is_available())
            if self.gpu_is_used:
                say(f"{why_not}; this job shares the GPU by turns, not its memory")
            return
        self.gpu_is_used = False
        self.captures.install(_cuda.CUDAGraph)
        _cuda._lazy_call(self._gpu_is_in_use)

    def _gpu_is_in_use(self) -> None:
        self.gpu_is_used = True
        if self.on_first_use is not None:
            self.on_first_use()
        try:
            backend = _cuda.get_allocator_backend()
            if backend != "native":
                say(
                    f"the script brings an allocator of its own ({backend}); it shares the GPU by turns, not its memory"
                )
                return
            self._device = int(_cuda.current_device())
            if not self._lease.attach(self):
                return
            # Kept for good: torch may call them as long as the process lives.
            self._allocators = [_C._cuda_customAllocator(*self._arena.functions(kind)) for kind in ("private", "lane")]
            pools = [*(_cuda.MemPool(allocator) for allocator in self._allocators), _cuda.MemPool()]
            self._private, self._lane, self._nothing = (Pool(pool, pool.id) for pool in pools)
            self._lives_in_lane, self._lives_nowhere = (
                functools.partial(_Torch.lives, self._device, pool.id) for pool in (self._lane, self._nothing)
            )
            self._route(self._private)
            self._lender = Lender(self._arena, "cuda")
            torch_sharing.lend_from(lambda: self._lender if self.active else None, self._bring_back)
            self.active = True
        except Exception as error:
            say(f"memory cannot be shared ({type(error).__name__}: {error}); this job shares the GPU by turns")

    def begin_anew(self) -> None:
        """For the child of a fork: the memory is the parent's, and torch does not use the GPU there.

        If the parent had not used the GPU, the child may, and then it is told as the parent would have been.
        """
        self.active = self.stays = False
        self._routed = self._meant = None
        self._known = Known()
        self.captures.begin_anew()

    # For the lease.

    def open(self, page_address: int, channel: int) -> None:
        placed = os.environ.get("SALUS_GPU")
        found = gpu_uuid(_cuda.get_device_properties(self._device))
        if placed and found and placed != found:
            # A lane of one GPU is nothing to a process on another.
            raise SalusError(f"the script uses {found}, and was given {placed}")
        arena = Arena()
        arena.open("cuda", self._device, page_address, channel)
        arena.trust(WHERE_IT_WAITS)
        self._arena = arena

    def will_yield(self) -> None:
        """Lets torch walk over all its blocks in vain: when it looks for what lives in the lane, they are cached."""
        with contextlib.suppress(Exception):
            if self.active:
                self._lives_nowhere(set())

    def will_resume(self) -> None:
        if self.active:
            self._arena.take_in()

    def stay(self) -> bool:
        if self.active:
            self._route(self._lane)
        return self.stays

    def rest(self) -> None:
        """Between iterations: what comes is the job's own, as long as none begins."""
        if self.stays:
            self._lease.between_iterations(self.iteration_ended)

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        if self.captures.under_way:
            return STAYS, 0
        stayed = self.stays
        left, since = self._leave(word, ticket, wants_more)
        if left == STAYS and stayed:
            self.stay()
        return left, since

    def _leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        try:
            if not self.active:
                self._arena.wait()
                return LEFT, time.monotonic_ns()
            if self._lender is not None:
                self._lender.collect()
            if self._trace is not None:
                self._mark("idle" if _cuda.current_stream(self._device).query() else "yields")
            # First of all: what is allocated from here on is not in the lane, and what was before is found there.
            self._route(self._private)
            # While the GPU works on; what is freed from here on is promoted for nothing, and never wrongly kept.
            live = self._live()
            self._mark("sorted")
            left = self._arena.leave(live, word, ticket, wants_more)
            when = self._arena.when
            if self._trace is not None:
                done = ("promoted", "waited", "left", "passed")[: {LEFT: 3, PASSED: 4}.get(left, 0)]
                self._trace += zip(done, when, strict=False)
            return left, when[1]
        except (SalusError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            # Without knowing what lives in the lane, it cannot be left. (Others are of handlers of the script.)
            why = (str(error).strip().splitlines() or [""])[0]
            self._once(f"the lane cannot be left ({type(error).__name__}: {why})")
            return STAYS, 0

    def _live(self) -> array.array[int]:
        flat = self._known.find(self._arena.segments(), self._lives_in_lane)
        if flat is None:
            live = Live.of(_Torch.snapshot(self._lane))
            if live.pending:
                self._arena.wait()
                self._reclaim()
                live = Live.of(_Torch.snapshot(self._lane))
            flat = ranges(live.blocks.items())
            self._known.add(live, flat)
        return flat

    def _mark(self, what: str) -> None:
        if self._trace is not None:
            self._trace.append((what, time.monotonic_ns()))

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        return self._arena.pass_on(word, ticket, wants_more)

    def after_grant(self) -> bool:
        if self._trace is not None:
            self._trace.append(("woke", self._lease.woke_ns))
            self._mark("seen")
        brought = not self.active or self._arena.resume(poison=self._poison)
        self._mark("ours")
        return brought

    def wait(self) -> None:
        with contextlib.suppress(SalusError):  # the script will see that for itself
            self._arena.wait()

    def detach(self) -> bool:
        return not self.active or self._arena.detach()

    def where(self) -> tuple[bool, bool]:
        return self._arena.where()

    def reopen(self, page_address: int, channel: int, holds: bool) -> None:
        self._arena.reconnect(page_address, channel, holds)

    def go_alone(self) -> None:
        self._arena.go_alone()

    def listen(self) -> bool:
        return self._arena.listen()

    # For the adaptor.

    def iteration_began(self) -> None:
        self._route(self._lane)

    def iteration_ended(self) -> None:
        self._route(self._private)

    def first_step_began(self) -> None:
        """The optimizer is about to make its state."""
        if self._routed is self._lane:
            self._route(self._private)

    def first_step_ended(self) -> None:
        self._route(self._lane)

    def sort(self, on: bool) -> None:
        """Between iterations. Off, allocations go where torch would make them: to see what sorting costs."""
        if self.active:
            self._route(self._private if on else None)

    # For `Captures`. Of the pools that were begun, torch takes the last (older versions the first). One of ours could
    # come before the capture's own, so within a capture there is none of ours.

    def _of_captures(self) -> Arena:
        """Also in a process without an arena: it may have borrowed memory, and return it within a capture."""
        return self._arena if hasattr(self, "_arena") else Arena()

    def capture_began(self) -> None:
        self._meant = self._routed
        if self.active:
            self._switch_to(None)
        self._of_captures().capture_began()

    def capture_ended(self) -> None:
        self._of_captures().capture_ended()
        if self.active:
            self._switch_to(self._meant)

    def _route(self, pool: Pool | None) -> None:
        if self.captures.under_way:
            self._meant = pool
        else:
            self._switch_to(pool)

    def _switch_to(self, pool: Pool | None) -> None:
        before, device = self._routed, self._device
        if before is pool:
            return
        if before is not None:
            _C._cuda_endAllocateToPool(device, before.id)
            _C._cuda_releasePool(device, before.id)
            self._routed, self.stays = None, False
        if pool is not None:
            _C._cuda_beginAllocateToPool(device, pool.id)
            self._routed, self.stays = pool, pool is self._lane

    def _reclaim(self) -> None:
        """Lets torch take back blocks that other streams are done with. Up to 2.12 it does so outside any pool only."""
        before = self._routed
        self._route(None)
        try:
            torch.empty(1, device=f"cuda:{self._device}")
        finally:
            self._route(before)

    @staticmethod
    def _bring_back() -> None:
        """A thread of the script wants to share memory that is on the host."""
        if iterations.installed is not None:
            iterations.installed.fetch_memory()
        # A thread that waits in there is known to use nothing of the device.
        threading.Event().wait(BRING_BACK_S)

    def _write_trace(self) -> None:
        with contextlib.suppress(OSError), open(f"{os.environ['SALUS_TRACE']}.{os.getpid()}", "w") as file:
            json.dump(self._trace, file)

    def _once(self, text: str) -> None:
        if not getattr(self, "_said", False):
            self._said = True
            say(text)


class RoutedLease:
    """A lease that also routes memory: to the lane within an iteration, to the job itself between."""

    def __init__(self, lease: Lease, memory: TorchMemory) -> None:
        self._lease, self._memory = lease, memory

    def begin(self) -> None:
        if not self._memory.captures.takes_begin():
            self._lease.begin()
        if self._memory.active:
            self._memory.iteration_began()

    def end(self, iterations: int = 1) -> None:
        # In this order: after the end somebody else may run in the lane.
        if self._memory.active:
            self._memory.iteration_ended()
        captures = self._memory.captures
        if not captures.takes_end(iterations):
            self._lease.end(iterations + captures.owed())

    def usual(self) -> Usual | None:
        return None if self._memory.captures.under_way else self._lease.usual()

    def run_on(self, sits: Callable[[], None]) -> Turn | None:
        return None if self._memory.captures.under_way else self._lease.run_on(sits)

    def goes_on(self) -> None:
        self._lease.goes_on()

    def count(self, iterations: int) -> None:
        self._lease.count(iterations)

    def is_wanted(self) -> bool:
        return self._lease.is_wanted()
