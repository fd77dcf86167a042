"""What jobs may be called, and what users are called."""

from __future__ import annotations

import pwd

from salus.errors import RequestRejected

LONGEST_NAME = 200
"""Of a job, in characters: more are not shown."""


def check_job_name(name: str) -> str:
    if not name.strip():
        raise RequestRejected("--name: it is empty; leave it out to call the job by its script")
    if not name.isprintable():
        raise RequestRejected(f"--name: {name!r:.60} has characters that do not print; write letters, digits, signs")
    if len(name) > LONGEST_NAME:
        raise RequestRejected(f"--name: {len(name)} characters are too many; write at most {LONGEST_NAME}")
    return name


def user_name(uid: int) -> str:
    """The number, where there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
