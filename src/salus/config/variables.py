"""Variables of the environment that are no settings: where things are, what a job is given, what tests need.

Every setting has a variable too: SALUS_SERVICE_POLICY for service.policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from salus.config.schema import SETTINGS


class For(Enum):
    USERS = "users"
    JOBS = "jobs: set by salus run"
    TESTS = "tests and packagers"


@dataclass(frozen=True)
class Variable:
    name: str
    who: For
    help: str


VARIABLES = (
    Variable("SALUS_SOCKET", For.USERS, "The socket of the service to use, or to serve at."),
    Variable(
        "SALUS_SERVICE",
        For.USERS,
        "Which to use: own, system (the machine-wide one), or auto: that if it is there.",
    ),
    Variable("SALUS_RUNTIME_DIR", For.USERS, "The folder of your own socket. Default: $XDG_RUNTIME_DIR/salus."),
    Variable("SALUS_STATE_DIR", For.USERS, "The folder of journal, history, records and output of jobs."),
    Variable("SALUS_CONFIG", For.USERS, "The user's settings file. Default: ~/.config/salus/config.toml."),
    Variable("SALUS_RECONNECT_S", For.USERS, "Seconds for which a job waits for a service that was killed."),
    Variable("SALUS_POISON", For.TESTS, "1: fill the lane with NaN patterns at every switch."),
    Variable("SALUS_TRACE", For.TESTS, "A file that a job writes the times of its switches to."),
    Variable("SALUS_JOB", For.JOBS, "The job's id."),
    Variable("SALUS_TOKEN", For.JOBS, "By which the service knows a process of the job."),
    Variable("SALUS_GPU", For.JOBS, "The GPU that the job was given."),
    Variable("SALUS_APART", For.JOBS, "1: the process is no part of the job that it descends from."),
    Variable("SALUS_BOOTSTRAP", For.JOBS, "The folder through which the job's processes load Salus."),
    Variable("SALUS_SYSTEM_CONFIG_DIR", For.TESTS, "The folder of the machine's settings file. Default: /etc/salus."),
    Variable("SALUS_SYSTEM_RUNTIME_DIR", For.TESTS, "The folder of the machine-wide socket. Default: /run/salus."),
    Variable("SALUS_SYSTEM_STATE_DIR", For.TESTS, "What the machine-wide service keeps. Default: /var/lib/salus."),
    Variable("SALUS_SYSTEM_UNIT_DIR", For.TESTS, "Where install-service puts the unit. Default: /etc/systemd/system."),
)


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Variables that look like ours and are read by nothing: misspelt, as a rule."""
    return sorted(name for name in environment if name.startswith("SALUS_") and not is_known(name))


def is_known(name: str) -> bool:
    return name in {one.name for one in VARIABLES} or name in {setting.variable for setting in SETTINGS}
