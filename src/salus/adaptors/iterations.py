"""Where an iteration begins and ends: the rules, without a framework.

An adaptor reports what it sees (a forward, a backward, an optimizer's step); this turns it into calls of a lease,
`begin` and `end` in strict alternation. The rules:

- Training begins at the first forward, backward or step and ends after the step. Every step is a boundary. Counted are
  those of the leader, the first optimizer that stepped; if it is gone, or silent for 100 steps of others, the next one
  leads. So does one that was made after the leader's last step (the next fold or trial), for as long as it steps.
- A step inside a backward (an optimizer that runs in gradient hooks) ends nothing before that backward is through.
- A process that built no optimizer and ran no backward does not train: its forwards are inference whatever their mode.
  If it runs backward but has no optimizer, it updates by hand: the first forward after a backward starts the next one.
- Inference is a forward without gradients or of a module in eval mode: one iteration, over when the forward returns.
  Inside an open training iteration (a teacher, a target network) it changes nothing.
- A module in eval mode whose forward a backward follows is being trained (frozen batch norm, an image being optimized).
  From then on its forwards with gradients are training.
- Training that no step followed (the rest of an accumulation before an evaluation) must not stay open for ever. It
  ends, not counted, at a forward of inference if two things hold.
  First, nothing waits for a backward: the last thing that happened was a backward that kept no graph, or the adaptor
  finds that no graph alive reaches what the optimizers train. So no iteration ends between a forward and its backward.
  (Two graphs built, and an evaluation between their two backwards, is the exception: the forward after the first
  backward is all that is looked at. It costs memory, never data: what is alive at a boundary is promoted.)
  Second, it is an evaluation and no teacher: the trained module itself is now in eval mode, or it is the eighth forward
  of inference in a row.
- Explicit marks win: inside one, whatever the adaptor sees opens and closes nothing.

Each thread that iterates has a machine of its own, all of this is told by thread, and `joint` makes one of their
boundaries. They have one lock, which is held while `begin` blocks: a second thread that wants to run waits as well.

The common way (a forward, its backward, its step) is written with few calls, and takes the lock only where an iteration
begins or ends. It runs when the caches are full of the script's numbers: a call costs a microsecond or two there, and
the lock seven, where all of it together takes six in a loop.

If something fails in here, the script runs on as a single iteration. It is said once, on stderr; nothing is raised.
Must not know: torch, sockets, clocks, or what a lease does.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from threading import get_ident
from types import FrameType
from typing import Any, Protocol
from weakref import ReferenceType, ref

from salus.adaptors.joint import SharedLease
from salus.adaptors.process import Process
from salus.client.say import say
from salus.client.turns import Turn

LEADER_SILENT_STEPS = 100
EVALUATION_FORWARDS = 8


class Lease(Protocol):
    def begin(self) -> None:
        """An iteration starts: blocks until the job may run."""

    def end(self, iterations: int = 1) -> None:
        """A boundary; 0 where the job may be switched out but nothing is counted."""

    def usual(self) -> tuple[Callable[[], bool], Callable[[int], bool]] | None:
        """`begin` and `end` in one short call each, while nobody else wants to run; False: nothing was done."""

    def run_on(self, sits: Callable[[], None]) -> Turn | None:
        """Begins an iteration, and gives back what ends one and begins the next; False: nothing was done.

        `sits` is called, by another thread, where somebody waits and no iteration has ended for long.
        """

    def goes_on(self) -> None:
        """The open iteration, of one that ran on, is one like any other from here on."""

    def count(self, iterations: int) -> None:
        """These ended, and it was no boundary: another thread of the script is inside an iteration."""

    def is_wanted(self) -> bool:
        """Somebody waits for it: the next boundary is the last."""


class Kind(Enum):
    NONE = "none"
    TRAINING = "training"
    INFERENCE = "inference"
    EXPLICIT = "explicit"


# Looked up once: this runs at every boundary, and before Python 3.12 an enum's member costs more than a call.
NONE, TRAINING, INFERENCE, EXPLICIT = Kind


class Iterations:
    """Of one thread. The first one made stands for the whole process, to whoever marks iterations."""

    def __init__(self, lease: Lease, process: Process[Iterations] | None = None) -> None:
        self.kind = NONE
        self.lease = lease
        self.process = Process(self, self._another) if process is None else process
        self._lock = self.process.lock
        # What is known about the thread.
        self.leading: ReferenceType[Any] | None = None
        self._followed: list[ReferenceType[Any]] = []
        """Leaders that others took over from."""
        self._made_when_it_led = 0
        """So many optimizers had been made when the leader stepped last."""
        self.steps_of_others = 0
        self.steps = 0
        """Of optimizers, as far as hooks saw them. Counted by the adaptor."""
        self.replays_in_a_row = 0
        """Of captured graphs, with nothing else between them (`replays`)."""
        self.looks = True
        """The next forward begins an iteration. For an adaptor that sees forwards of several threads."""
        # What is known about the open iteration. Where it is like all others, an adaptor keeps the public ones itself.
        self.thread = 0
        self._modules: list[ReferenceType[Any]] = []
        self.wants_backward = False
        self._inferences = 0
        # One entry for each that runs. Lists grow and shrink as one, without the lock.
        self.backwards: list[None] = []
        self.stepped_in_backward = False
        self._counted_in_backward = False
        self._given_up = False
        """In the middle of a step, perhaps."""
        # The last inference, if it had gradients: module and mode. And whether the step to come was counted with it.
        self._with_graph: tuple[ReferenceType[Any], bool] | None = None
        self._already_counted = False
        # Explicit marks: how deep each thread is in them, and how many have ended since the first began.
        self._marks: dict[int, int] = {}
        self._marks_done = 0

    def _another(self, lease: SharedLease) -> Iterations:
        return Iterations(lease, self.process)

    @property
    def is_open(self) -> bool:
        return self.kind is not NONE

    @property
    def failed(self) -> bool:
        return self.process.failed

    # What an adaptor reports.

    def forward(self, module: Any, training: bool, gradients: bool, stepping: bool) -> bool:
        """A top-level forward begins. True if it is followed: `returned` must be called when it is over."""
        with self._lock:
            self.replays_in_a_row = 0
            if self.kind is EXPLICIT or self.kind is INFERENCE:
                return False
            if gradients and (training or _among(self.process.trained_in_eval, module)):
                if self.process.has_optimizer or self.process.has_backward:
                    self._training_forward(module)
                    return False
            elif self.kind is TRAINING:
                self._inferences += 1
                if stepping or self.backwards or not self._is_evaluation(module, training):
                    return True
                if self.wants_backward and self.process.graph_is_alive():
                    self._inferences = 0  # not asked again at once
                    return True
                self._end(0)
            self._already_counted = False
            self._begin(INFERENCE)
            self._with_graph = (ref(module), training) if gradients else None
            return True

    def returned(self) -> None:
        """The forward that was followed is over."""
        with self._lock:
            if self.kind is INFERENCE and self.thread == get_ident():
                self._end(1)

    def backward_began(self) -> None:
        """`backward_ended` must be called, also if this raises (the user may interrupt the wait for a lease)."""
        self.backwards.append(None)
        self.process.has_backward = True
        self.replays_in_a_row = 0
        if self.kind is not NONE:
            return
        with self._lock:
            if self.kind is NONE:
                if self._with_graph is not None:
                    module, training = self._with_graph
                    self._already_counted = True
                    if not training:
                        self.process.trained_in_eval.append(module)
                self._begin(TRAINING)

    def backward_ended(self, graph_is_gone: bool) -> None:
        if self.backwards:
            self.backwards.pop()
        if self.kind is not TRAINING:
            return
        self._inferences = 0
        if graph_is_gone:
            self.wants_backward = False
        if self.stepped_in_backward:
            with self._lock:
                if self.stepped_in_backward and not self.backwards:
                    self._end(int(self._counted_in_backward))

    def step_began(self) -> bool:
        """True, as for a forward that is followed: `step_ended` must be called, unless the step raises."""
        self.process.has_optimizer = True
        if self.kind is NONE:
            with self._lock:
                if self.kind is NONE:
                    self._begin(TRAINING)
        return True

    def step_ended(self, *optimizers: Any) -> None:
        """The step is done, or was skipped because the gradients were no numbers. Or several at once, in a graph."""
        with self._lock:
            self.replays_in_a_row = 0
            counted = sum(map(self._counts, optimizers)) > 0
            if self.kind is NONE and self._given_up:
                self._given_up = False
                self.lease.count(int(counted))
            if self.kind is not TRAINING:
                return
            if self.backwards:
                self.stepped_in_backward = True
                self._counted_in_backward |= counted
            else:
                self._end(int(counted))

    def scaler_updated(self) -> None:
        """All steps of this iteration were taken or skipped. Still open: the script itself skipped the only one."""
        with self._lock:
            if self.kind is TRAINING and not self.backwards and not self.wants_backward:
                self._end(1)

    def tell_others(self) -> None:
        """What is open began in a quick way, and another thread begins: it is to know of it."""
        with self._lock:
            if self.kind is not NONE:
                self.lease.goes_on()

    def over(self, *, counted: bool) -> None:
        """Nothing more belongs to the training that is open, as far as the adaptor can tell."""
        with self._lock:
            if self.kind is TRAINING and not self.backwards:
                self._end(int(counted))

    # Iterations that are all alike.

    def usual(self) -> tuple[Callable[[], bool], Callable[[int], bool]] | None:
        """For an adaptor that knows the iterations to come: how to begin and end them without this. None: it cannot be.

        It keeps `kind`, `thread`, `wants_backward`, `backwards` and `steps_of_others` itself then, and calls `goes_on`
        when something else happens.
        """
        if self.kind is not NONE or self.failed:
            return None
        self._with_graph = None
        with self._lock:
            return self.lease.usual()

    def run_on(self, sits: Callable[[], None]) -> Turn | None:
        """The next one begins where this one ended; what ends it and begins the one after it. None: it cannot be."""
        with self._lock:
            turn = self.lease.run_on(sits) if self.kind is NONE and not self.failed else None
            if turn is not None:
                self.kind, self.thread = TRAINING, get_ident()
            return turn

    def let_go(self, look_closely: Callable[[], None], is_under_way: Callable[[], bool]) -> None:
        """From another thread: of those that follow one another, none has ended for long. Unless it is under way."""
        # Not where a thread of the script is in here, or waits for a lease: then it is on its way.
        if not self._lock.acquire(blocking=False):
            return
        try:
            look_closely()
            # In this order: whoever begins from here on waits for the lock, and who has begun before that is found.
            kind = self.kind
            if kind is TRAINING:
                self.kind = NONE
            try:
                under_way = is_under_way() or bool(self.backwards) or kind is EXPLICIT
            except BaseException:
                self.kind = kind
                raise
            if under_way:
                self.kind = kind
                self.lease.goes_on()
            elif kind is TRAINING:
                self._end(0)
            elif kind is NONE:
                self.lease.end(0)  # it was interrupted while it began to run on
        finally:
            self._lock.release()

    def goes_on(self, modules: list[ReferenceType[Any]], *, has_begun: bool = True) -> None:
        """An iteration that was begun without this is one like all others from here on; or else is not, as it seems."""
        with self._lock:
            if self.kind is TRAINING and (has_begun or self.backwards):
                self.lease.goes_on()
                self._modules = modules
            elif self.kind is TRAINING:
                self._end(0)

    def fetch_memory(self) -> None:
        """Where no iteration is open, the job gets the lease for a moment, and so its memory comes from the host."""
        # Whoever holds the lock gets the lease, or has it. And a thread that waited for the lock could not be told from
        # one that uses the device, so that nothing would come.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.kind is NONE and not self.failed:
                self._begin(EXPLICIT)
                self._end(0)
        finally:
            self._lock.release()

    # Explicit marks.

    def mark_began(self) -> None:
        """In this thread, whichever thread this is the machine of; so too where it ends."""
        self.process.machine()._mark_began()

    def mark_ended(self) -> None:
        self.process.machine()._mark_ended()

    def _mark_began(self) -> None:
        with self._lock:
            if self.failed:
                return
            thread = get_ident()
            self._marks[thread] = self._marks.get(thread, 0) + 1
            try:
                if self.process.on_mark is not None:
                    self.process.on_mark()
                if self.kind is NONE:
                    self._begin(EXPLICIT)
                elif self.kind is TRAINING:
                    self.lease.goes_on()
                # One that hooks opened before the mark goes on as the mark's: its forward may still want its backward.
                self.kind = EXPLICIT
            except Exception as error:
                self.fail(error)

    def _mark_ended(self) -> None:
        with self._lock:
            thread = get_ident()
            depth = self._marks.pop(thread, 0) - 1
            if self.failed or depth < 0:
                return
            if depth:
                self._marks[thread] = depth
                return
            self._marks_done += 1
            if not self._marks:
                done, self._marks_done = self._marks_done, 0
                try:
                    self._end(done)
                except Exception as error:
                    self.fail(error)

    # Failure.

    def fail(self, error: BaseException) -> None:
        """Say so once, stop looking, and let the rest of the run be one iteration.

        The lease is taken and kept: a job that runs without one could run beside another in the same lane.
        """
        with self._lock:
            if self.failed:
                return
            self.process.failed = True
            reason = f"{type(error).__name__}: {error}"
            say(f"iterations are no longer found ({reason}); the rest of this run is one iteration")
            try:
                if self.process.on_failure is not None:
                    self.process.on_failure()
                if self.kind is NONE:
                    self._begin(EXPLICIT)
            except Exception:
                pass  # it was said once, and there is nothing left to try
            self.kind = EXPLICIT

    def take_lease(self, lease: Lease) -> None:
        """From now on this one: torch was imported after the first mark, and the lease routes its memory too."""
        self.process.take_lease(lease)

    def begin_anew(self) -> None:
        """For the child of a fork: what is open is the parent's. What is known about the script stays."""
        # A thread that does not exist in the child may hold the lock.
        self.process.begin_anew()
        self._lock = self.process.lock
        self.kind = NONE
        self.looks = True
        self.thread = 0
        self._modules = []
        self.backwards = []
        self.wants_backward = self.stepped_in_backward = self._counted_in_backward = self._already_counted = False
        self._inferences = self._marks_done = 0
        self._given_up = False
        self._with_graph = None
        self._marks = {}

    # Inside.

    def _begin(self, kind: Kind) -> None:
        self.lease.begin()
        self._given_up = False
        self.kind = kind

    def give_up(self, *, gone: bool) -> bool:
        """From another thread: what is open is not expected to end, and keeps others waiting. False: it goes on.

        What comes then begins an iteration. `gone`: nothing comes, the thread has ended.
        """
        if not gone and (self.kind is not TRAINING or self.backwards):
            return False
        self._close()
        self._given_up = not gone
        self._marks.clear()
        return True

    def _close(self) -> None:
        if self.kind is not INFERENCE:
            self._with_graph = None
        self.kind = NONE
        self.looks = True
        if self._modules:
            self._modules.clear()
        self.wants_backward = self.stepped_in_backward = self._counted_in_backward = False
        self._inferences = 0

    def _end(self, iterations: int) -> None:
        self._close()
        try:
            self.lease.end(iterations)
        finally:
            if self.process.on_boundary is not None:
                self.process.on_boundary()

    def _training_forward(self, module: Any) -> None:
        self._with_graph = None
        if self.kind is TRAINING and not self.process.has_optimizer and not self.wants_backward:
            self._end(int(self._one()))
        if self.kind is NONE:
            self._begin(TRAINING)
        self._inferences = 0
        self.wants_backward = True
        if not self._modules or not _among(self._modules, module):
            self._modules.append(ref(module))

    def _is_evaluation(self, module: Any, training: bool) -> bool:
        return self._inferences >= EVALUATION_FORWARDS or (
            not training and self._inferences == 1 and _among(self._modules, module)
        )

    def _counts(self, optimizer: Any) -> bool:
        leader = None if self.leading is None else self.leading()
        if leader is not optimizer:
            if leader is not None and self._takes_over(optimizer):
                self._followed = [known for known in self._followed if known() is not None]
                self._followed.append(ref(leader))
            elif leader is not None:
                self.steps_of_others += 1
                if self.steps_of_others < LEADER_SILENT_STEPS:
                    return False
            self.leading = ref(optimizer)
        self.steps_of_others = 0
        self._made_when_it_led = self.process.made
        return self._one()

    def _takes_over(self, optimizer: Any) -> bool:
        """It was made after the last step of the leader: the next model is trained. Or it led before one like that."""
        return self.process.number_of(optimizer) > self._made_when_it_led or _among(self._followed, optimizer)

    def _one(self) -> bool:
        """Whether this iteration counts: not if it did as the inference that its forward was taken for."""
        counts, self._already_counted = not self._already_counted, False
        return counts


def _among(references: list[ReferenceType[Any]], thing: Any) -> bool:
    """By identity: a module may define equality and so be unhashable."""
    return bool(references) and any(reference() is thing for reference in references)


def is_running(outer: FrameType, frame: FrameType | None) -> bool:
    """Is one frame the other, or does it lie below it on the stack?"""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False


installed: Iterations | None = None
"""What counts here. Marks look for it under this name (`salus.marks`). None outside Salus, and until it is needed."""


def set_installed(iterations: Iterations | None) -> None:
    global installed
    installed = iterations
