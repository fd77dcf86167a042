"""What is known of a process as a whole, and the state machine of each of its threads.

Most scripts iterate in one thread, and then there is one machine, which has the lease to itself. When a second thread
reports something it gets a machine of its own, and from then on the machines share the lease (`joint`).

A thread of the framework's own that runs a backward (autograd's) belongs to the thread that called for the backward.

Must not know: the framework, the rules of iterations, or what a lease does.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _current_frames
from threading import RLock, get_ident, local
from typing import Any, Generic, Protocol, TypeVar
from weakref import ReferenceType, ref

from salus.adaptors.joint import Joint, SharedLease


class Machine(Protocol):
    lease: Any
    thread: int
    backwards: list[None]
    leading: ReferenceType[Any] | None

    @property
    def is_open(self) -> bool: ...

    def give_up(self, *, gone: bool) -> bool:
        """As `joint.Source` has it."""


M = TypeVar("M", bound=Machine)


class Process(Generic[M]):
    def __init__(self, first: M, another: Callable[[SharedLease], M]) -> None:
        self.lock = RLock()
        """Held while a lease is waited for: a second thread that wants to run waits as well."""
        self.failed = False
        self.has_optimizer = False
        self.has_backward = False
        self.trained_in_eval: list[ReferenceType[Any]] = []
        # What the adaptor wants to hear.
        self.on_boundary: Callable[[], None] | None = None
        """Called when a thread has no iteration open any more: the adaptor looks for the next one."""
        self.on_failure: Callable[[], None] | None = None
        self.on_mark: Callable[[], None] | None = None
        """Called when an explicit mark begins: what the adaptor knew of the iterations to come is no longer true."""
        self.on_another_thread: Callable[[], None] | None = None
        """Called when a second thread has a machine."""
        self.graph_is_alive: Callable[[], bool] = lambda: True
        """May a backward still come for a forward that was seen? It need not be quick, but must not say no wrongly."""
        self.is_in_backward: Callable[[], bool] = lambda: False
        """Whether this thread is at work for a backward."""
        self.first, self._another = first, another
        self._mine = local()
        """Has the machine of each thread. (Not by the thread's number: that is used again when a thread has ended.)"""
        self._machines: list[M] = []
        """Those that are in use."""
        self._joint: Joint | None = None
        self.made = 0
        """Optimizers so far."""
        self._made: list[tuple[ReferenceType[Any], int]] = []

    def machine(self, optimizer: Any = None) -> M:
        """Of this thread. `optimizer`: whose step is reported, which may tell whose backward this is."""
        try:
            machine: M = self._mine.machine
        except AttributeError:
            machine = self._new(optimizer)
        return machine

    def known(self) -> M | None:
        """Of this thread, if it has reported anything yet."""
        return getattr(self._mine, "machine", None)

    def optimizer_made(self, optimizer: Any) -> None:
        self.has_optimizer = True
        self.made += 1
        self._made = [known for known in self._made if known[0]() is not None]
        self._made.append((ref(optimizer), self.made))

    def number_of(self, optimizer: Any) -> int:
        """The how-manieth that was made; 0: it is not known."""
        return next((number for known, number in self._made if known() is optimizer), 0)

    def take_lease(self, lease: SharedLease) -> None:
        with self.lock:
            if self._joint is None:
                self.first.lease = lease
            else:
                self._joint.lease = lease

    def begin_anew(self) -> None:
        """For the child of a fork: this thread is its only one, and one that does not exist there may hold the lock."""
        self.lock = RLock()
        if self._joint is not None:
            self.first.lease = self._joint.lease
        self._joint, self._machines, self._mine = None, [], local()

    def _new(self, optimizer: Any) -> M:
        if self._machines and self.is_in_backward():
            return self._whose_backward(optimizer)
        with self.lock:
            machine = self._another_one() if self._machines else self.first
            machine.thread = get_ident()
            self._machines.append(machine)
            self._mine.machine = machine
        if machine is not self.first and self.on_another_thread is not None:
            self.on_another_thread()
        return machine

    def _another_one(self) -> M:
        if self._joint is None:
            first = self.first
            self._joint = Joint(first.lease, self.lock)
            first.lease = self._joint.part(first, inside=first.is_open)
        self._forget_ended_threads(self._joint)
        made = self._another(self._joint.lease)
        made.lease = self._joint.part(made)
        return made

    def _forget_ended_threads(self, joint: Joint) -> None:
        alive = set(_current_frames()) - {get_ident()}
        for machine in [machine for machine in self._machines if machine.thread not in alive]:
            if machine.is_open:
                machine.give_up(gone=True)
            self._machines.remove(machine)
            joint.leave(machine.lease)

    def _whose_backward(self, optimizer: Any) -> M:
        running = [machine for machine in self._machines if machine.backwards]
        leads = [one for one in running if one.leading is not None and one.leading() is optimizer]
        # (While iterations follow one another, no backward is noted.)
        return [*leads, *running, *(machine for machine in self._machines if machine.is_open), self.first][0]
