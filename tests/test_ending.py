"""The phases of a job's end: what is signalled when, with made-up processes."""

from __future__ import annotations

import signal

import pytest

from salus.ending import LEAVING_S, TRANSITIONS, Ending, Phase
from salus.errors import InvariantBroken
from salus.processes import STOPPED, Process

REAPER = 1


class Job:
    """Processes that are there, and the signals they were sent."""

    def __init__(self, grace_s: float = 10.0) -> None:
        self.there: dict[int, Process] = {}
        self.sent: list[tuple[int, int]] = []
        self.others: set[int] = set()
        self.ending = Ending(lambda: list(self.there.values()), grace_s, self.send)

    def add(self, pid: int, parent: int = REAPER, state: str = "S") -> None:
        self.there[pid] = Process(pid, parent, began=pid, state=state, name="p")

    def send(self, process: Process, number: int) -> bool:
        if process.pid in self.others:
            raise PermissionError
        self.sent.append((process.pid, number))
        return True

    def look(self, now: float) -> list[tuple[int, int]]:
        """What is sent at this look."""
        self.sent = []
        self.ending.look(now)
        return self.sent


def test_a_running_job_is_left_alone():
    job = Job()
    job.add(2)
    assert job.look(0.0) == [] and job.ending.look_at_s is None


def test_all_are_asked_once_and_after_the_grace_period_what_is_left_is_killed():
    job = Job(grace_s=10)
    job.add(2)
    job.add(3, parent=2)
    job.ending.ask(Phase.ENDING, 0.0)
    assert job.look(0.0) == [(2, signal.SIGTERM), (3, signal.SIGTERM)], "parents first: a shell starts nothing more"
    assert job.look(5.0) == []
    del job.there[2]
    assert job.look(10.0) == [(3, signal.SIGKILL)]
    assert job.look(10.1) == [(3, signal.SIGKILL)], "as long as it is there"
    del job.there[3]
    job.look(10.2)
    assert job.ending.phase is Phase.ENDED


def test_what_a_handler_starts_to_clear_up_is_let_alone_and_what_lost_its_parent_is_asked():
    job = Job()
    job.add(2)
    job.ending.ask(Phase.ENDING, 0.0)
    job.look(0.0)
    job.add(3, parent=2)
    assert job.look(0.1) == [], "the job clears up"
    del job.there[2]
    assert job.look(0.2) == [(3, signal.SIGTERM)]


def test_a_stopped_process_goes_on_so_that_it_can_end():
    job = Job()
    job.add(2, state=STOPPED)
    job.ending.ask(Phase.ENDING, 0.0)
    assert job.look(0.0) == [(2, signal.SIGTERM), (2, signal.SIGCONT)]


def test_force_kills_at_once_also_a_job_that_was_asked_to_end():
    job = Job()
    job.add(2)
    job.ending.ask(Phase.ENDING, 0.0)
    job.look(0.0)
    job.ending.ask(Phase.KILLING, 0.1)
    assert job.look(0.1) == [(2, signal.SIGKILL)]
    job.ending.ask(Phase.ENDING, 0.2)
    assert job.ending.phase is Phase.KILLING, "nothing leads back"


def test_what_a_command_leaves_running_may_end_by_itself_for_a_moment():
    job = Job()
    job.add(2)
    job.ending.ask(Phase.LEAVING, 0.0)
    assert job.look(0.0) == [] and job.ending.look_at_s == LEAVING_S
    assert job.look(LEAVING_S) == [(2, signal.SIGTERM)]


def test_a_job_that_leaves_nothing_has_ended_at_once():
    job = Job()
    job.ending.ask(Phase.LEAVING, 0.0)
    job.look(0.0)
    assert job.ending.phase is Phase.ENDED


def test_a_process_of_another_user_is_not_waited_for():
    job = Job()
    job.add(2)
    job.others.add(2)
    job.ending.ask(Phase.KILLING, 0.0)
    job.look(0.0)
    assert job.ending.phase is Phase.ENDED and [p.pid for p in job.ending.unreachable.values()] == [2]


def test_a_new_process_with_the_number_of_one_that_was_asked_is_another():
    job = Job()
    job.add(2)
    job.ending.ask(Phase.ENDING, 0.0)
    job.look(0.0)
    job.there[2] = Process(2, REAPER, began=99, state="S", name="p")
    assert job.look(0.1) == [(2, signal.SIGTERM)]


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_its_transitions_and_an_impossible_one_is_refused(phase):
    ending = Job().ending
    ending.phase = phase
    for other in set(Phase) - TRANSITIONS[phase]:
        with pytest.raises(InvariantBroken):
            ending._enter(other, 0.0)
