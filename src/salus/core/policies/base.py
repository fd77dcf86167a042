"""What a policy is.

A policy answers two questions and nothing else:
- in which order do waiting jobs get memory (`memory_order`, `may_displace`);
- which ready jobs should hold a lease now (`lease_order`, `choose`).
The scheduler keeps memory safe, turns the answers into grants and revocations, and asks again when something
happened. A policy sees jobs and the moment, and changes neither.

An order is a key: the job with the smaller one comes first, ties go to the job that arrived first. A job's keys may
change only when that job ran, began to compete or was measured: the scheduler asks for them again then, and only then.
What moves several jobs at once, like the share of the user they belong to, is the key of their group (`group`).
A policy may keep notes of its own in the `on_...` methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from salus.core.model import Job, JobSpec
from salus.core.order import Entry, Group, Key, group_key
from salus.errors import RequestRejected


class Rotation(Enum):
    """Whether a policy's answers change as jobs run, so that it has to be asked again: every quantum, or when the lease
    of the only lane has lasted."""

    NEVER = "never"
    IN_LANE = "in lane"
    """While two ready jobs share a lane."""
    ACROSS_LANES = "across lanes"
    """While there are two ready jobs on the GPU."""


@dataclass(frozen=True, slots=True)
class Moment:
    now: float
    quantum_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """A parameter of a policy, as in `fair:by=memory`."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()
    """Empty: any number above 0."""

    @property
    def expected(self) -> str:
        return "|".join(self.choices) if self.choices else "a number above 0"

    def check(self, policy: str, value: str) -> str:
        good = value in self.choices if self.choices else _is_positive_number(value)
        if not good:
            raise RequestRejected(
                f"policy {policy}: {self.name}={value!r} is not understood; expected {self.expected} ({self.help})"
            )
        return value


class Policy:
    """Base of all policies: jobs in the order they arrived, every lane at work."""

    name: str = ""
    """What a user writes. The name it was found by takes its place."""
    options: ClassVar[tuple[Option, ...]] = ()
    overtakes: ClassVar[bool] = True
    """Whether a job may get memory while one before it in the order does not fit yet."""
    patience_s: float = 0.0
    """Above 0 if `may_displace` looks at how long jobs have waited or stayed: it is asked again after this long."""
    note_classes: ClassVar[tuple[type, ...]] = ()
    """Classes of the policy's own (dataclasses and enums) that its notes are made of. A snapshot of the scheduler holds
    the notes; of other kinds it takes numbers, text, lists, tuples, sets, dicts, deques and jobs."""

    def __init__(self, **given: str) -> None:
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                takes = ", ".join(f"{o.name}={o.expected} ({o.help})" for o in self.options) or "none"
                raise RequestRejected(f"policy {self.name} has no parameter {name!r}; it takes: {takes}")
        self.settings = {name: o.check(self.name, given.get(name, o.default)) for name, o in known.items()}
        self._given = given

    def __str__(self) -> str:
        """The policy as a user would write it: `fair:by=memory`."""
        return self.name + ("" if not self._given else ":" + ",".join(f"{k}={v}" for k, v in self._given.items()))

    @property
    def rotates(self) -> Rotation:
        return Rotation.NEVER

    # The two questions.

    def group(self, job: Job) -> Group | None:
        """The group the job is in for as long as it is here; None: there is only one. Keys of jobs are compared inside
        a group only."""
        return None

    def memory_order(self, job: Job) -> Key:
        return job.arrival

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        """May the waiting job, which would run at once, take the lane or the memory of the resident one?"""
        return False

    def is_urgent(self, waiting: Job, resident: Job) -> bool:
        """True if it may displace even the last job that can run, while newcomers load: nobody computes then."""
        return False

    def is_patient(self, waiting: Job, moment: Moment) -> bool:
        """True if this waiting job may displace nobody yet, whoever is there. Saves asking about each of them."""
        return False

    def lease_order(self, job: Job) -> Key:
        return self.memory_order(job)

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        """Of the first ready job of each lane, in lease order: which should run now?

        Also asked with a waiting job among them, to learn whether it would run if it had memory.
        """
        return firsts

    # Notes, for a policy that needs more than a job shows.

    def on_arrived(self, job: Job) -> None: ...

    def on_ready(self, job: Job) -> None:
        """The job wants to run, for the first time or after a pause. It may have to wait for memory yet."""

    def on_competing(self, job: Job) -> None:
        """The job is in a lane and ready: it competes for leases from now on."""

    def on_resting(self, job: Job) -> None:
        """The job went idle, left its lane or ended: it no longer competes."""

    def on_served(self, job: Job, gpu_time_s: float, iterations: int) -> None: ...

    def on_changed(self, job: Job, before: JobSpec) -> None:
        """The job was given another weight or priority. It does not compete at this moment; its keys are asked for
        again after this."""

    def on_left(self, job: Job) -> None: ...


def lease_entry(policy: Policy, job: Job) -> Entry:
    """The job with a key that can be compared over all groups, as the policy sees it now."""
    return (group_key(policy.group(job)), policy.lease_order(job)), job.arrival, job


def memory_rank(policy: Policy, job: Job) -> tuple[Key, Key, int]:
    """Of two jobs, the one with the smaller rank comes first for memory."""
    return group_key(policy.group(job)), policy.memory_order(job), job.arrival


def fill(firsts: Sequence[Job]) -> list[Job]:
    """The first job, and after it those that fit into the part of the GPU that the ones before leave idle.

    A job whose utilization is not known is taken to need the whole GPU.
    """
    chosen: list[Job] = []
    idle = 1.0
    for job in firsts:
        needs = 1.0 if job.utilization is None else job.utilization
        if not chosen or needs <= idle + 1e-9:
            chosen.append(job)
            idle -= needs
    return chosen


def build(spec: str, classes: dict[str, type[Policy]]) -> Policy:
    """A policy from how a user writes it: `fair`, `fair:by=memory`, `srtf:fill=off`."""
    name, _, rest = spec.strip().partition(":")
    if name not in classes:
        raise RequestRejected(f"there is no policy {name!r}; there are: {', '.join(sorted(classes))}")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise RequestRejected(f"policy {name}: {part!r} is not understood; write parameters as name=value")
        if key.strip() in given:
            raise RequestRejected(f"policy {name}: {key.strip()} is given twice; say it once")
        given[key.strip()] = value.strip()
    policy = classes[name](**given)
    policy.name = name
    return policy


def _is_positive_number(text: Any) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
