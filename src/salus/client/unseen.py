"""Jobs that Salus does not see: a Python that the adaptor cannot be loaded into, or a script without an iteration.

The environment is how Salus comes into a job's processes. Options of Python (-I, -E, -S), a cleared environment or a
PYTHONPATH of the script's own keep it out, and such a job would run unmanaged without a word. Where the command shows
that, it is said before the job starts; else once at its end. What is looked at is what the kernel shows of the job's
processes: their command lines, environments and mapped files.

Must not know: sockets, signals, or how a job is started. It starts no process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from salus import processes
from salus.client.say import say

FIRST_LOOK_S = 5.0
"""A job that is shorter is not looked at."""
LONGEST_PAUSE_S = 15.0
PAGE = b"/memfd:salus-page"
"""Mapped by every process that has been given a lease, or waits for one."""
GPU_FILE = "/dev/nvidia-uvm"
"""Open in every process that has a context on a GPU."""
HOOK = "salus_hook.pth"
"""What `salus install-hook` puts next to the packages of a Python (`hook`)."""


class Cause(Enum):
    """What kept Salus out, and what to do about it."""

    ISOLATED = (
        "python was started with -I, which hides PYTHONPATH and so Salus from it",
        "leave -I out, or run once: salus install-hook --python {python}",
    )
    NO_ENVIRONMENT = (
        "python was started with -E, which hides PYTHONPATH and so Salus from it",
        "leave -E out, or run once: salus install-hook --python {python}",
    )
    NO_SITE = (
        "python was started with -S, and loads nothing at its start",
        "leave -S out, or mark the iterations: salus marks",
    )
    CLEARED = (
        "its environment was cleared on the way (as by env -i or sudo)",
        "let the variables through, or start salus run behind that: sudo salus run ...",
    )
    REPLACED = (
        "PYTHONPATH was replaced",
        "add to it (PYTHONPATH=folder:$PYTHONPATH), or run once: salus install-hook --python {python}",
    )
    NO_ITERATION = (
        "no iteration was seen in it",
        "mark the iterations: with salus.iteration()",
    )

    def told(self, arguments: Sequence[str]) -> str:
        what, advice = self.value
        return f"{what}; {advice.format(python=arguments[0] if arguments else 'python')}"


@dataclass(frozen=True)
class Found:
    """A process that uses torch or the GPU, and has not come to Salus."""

    arguments: Sequence[str]
    cause: Cause
    uses_gpu: bool


def cause_of(arguments: Sequence[str], environment: Mapping[str, str] | None) -> Cause:
    """Why a process does not come to Salus. The environment is the one it was started with; None: it cannot be read."""
    if environment is not None and "SALUS_JOB" not in environment:
        return Cause.CLEARED
    options = options_of_python(arguments)
    if "S" in options:
        return Cause.NO_SITE
    hides = "I" in options or "E" in options
    if hides and not is_hooked(arguments[0]):
        return Cause.ISOLATED if "I" in options else Cause.NO_ENVIRONMENT
    if environment is not None and not hides and not is_hooked(arguments[0]):
        bootstrap = os.path.dirname(environment.get("SALUS_BOOTSTRAP", ""))
        if bootstrap not in environment.get("PYTHONPATH", "").split(os.pathsep):
            return Cause.REPLACED
    return Cause.NO_ITERATION


def foreseen(command: Sequence[str]) -> Cause | None:
    """What the command itself shows, before it starts."""
    words, cleared = _behind_env(command)
    if cleared or (words and os.path.basename(words[0]) in ("sudo", "doas", "su")):
        return Cause.CLEARED
    if not options_of_python(words) & set("IES"):
        return None
    found = cause_of(words, None)
    return None if found is Cause.NO_ITERATION else found


def _behind_env(command: Sequence[str]) -> tuple[list[str], bool]:
    """The command that `env` starts, and whether it clears the environment."""
    words, cleared = list(command), False
    while words and os.path.basename(words[0]) == "env":
        words.pop(0)
        while words and (words[0].startswith("-") or "=" in words[0]):
            word = words.pop(0)
            cleared = cleared or word in ("-", "-i", "--ignore-environment")
            if word in ("-u", "-C") and words:
                words.pop(0)
    return words, cleared


def options_of_python(arguments: Sequence[str]) -> set[str]:
    """The letters of its options; none where it is no Python."""
    letters: set[str] = set()
    if not arguments or not _is_python(arguments[0]):
        return letters
    words = iter(arguments[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return letters
        for place, letter in enumerate(word[1:], 2):
            letters.add(letter)
            if letter in "cm":
                return letters
            if letter in "WX":
                # Their value is the rest of the word, or the next one.
                if place == len(word):
                    next(words, None)
                break
    return letters


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[\d.]*t?", os.path.basename(name)) is not None


def is_hooked(python: str) -> bool:
    """Whether that Python has the hook of `salus install-hook`, with which the adaptor loads also under -I and -E.

    Only files are looked at: this runs in the keeper of a job, whose every child belongs to the job.
    """
    found = shutil.which(python) if _is_python(python) else None
    if found is None:
        return False
    home = Path(found).absolute().parent.parent
    if not (home / "pyvenv.cfg").exists():
        home = Path(found).resolve().parent.parent
    return any(any(home.glob(f"{place}/python3*/*-packages/{HOOK}")) for place in ("lib", "lib64", "local/lib"))


class Unseen:
    """Looks at the processes of one job until one of them has come to Salus."""

    def __init__(self, job_id: str, command: Sequence[str], *, on_gpu: bool) -> None:
        self._job_id, self._on_gpu = job_id, on_gpu
        self._over = threading.Event()
        self._found: dict[int, Found] = {}
        self._foreseen = foreseen(command)
        if self._foreseen is not None:
            why = self._foreseen.told(_behind_env(command)[0])
            say(f"job {job_id} runs without Salus, unless its script has marks: {why}")

    def watch(self) -> None:
        """In the keeper: looks at all processes of the job from time to time, in a thread."""
        if self._foreseen is None:
            threading.Thread(target=self._watch, name="salus-unseen", daemon=True).start()

    def _watch(self) -> None:
        pause_s = FIRST_LOOK_S
        while not self._over.wait(pause_s):
            if self.look([process.pid for process in processes.below(os.getpid())]):
                return
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def look(self, pids: Sequence[int]) -> bool:
        """True: one of them has come to Salus."""
        for pid in pids:
            maps = _read(pid, "maps") or b""
            if PAGE in maps:
                return True
            uses_gpu = _uses_gpu(pid)
            if pid not in self._found and (b"libtorch" in maps or uses_gpu):
                arguments, variables = _words(_read(pid, "cmdline")), _read(pid, "environ")
                environment = dict(word.partition("=")[::2] for word in _words(variables))
                cause = cause_of(arguments, None if variables is None else environment)
                self._found[pid] = Found(arguments, cause, uses_gpu)
        return False

    def tell(self, status: int, *, came: bool) -> None:
        """The job has ended. `came`: the service says that one of its processes came, at any time."""
        self._over.set()
        if came or self._foreseen is not None:
            return
        # A reason that can be mended first.
        for found in sorted(self._found.values(), key=lambda found: found.cause is Cause.NO_ITERATION):
            uses_device = found.uses_gpu or not self._on_gpu
            if found.cause is not Cause.NO_ITERATION or (uses_device and status == 0):
                say(f"job {self._job_id} ran without Salus: {found.cause.told(found.arguments)}")
                return


def _read(pid: int, name: str) -> bytes | None:
    """None where it has ended, or is another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return None


def _words(text: bytes | None) -> list[str]:
    return [os.fsdecode(word) for word in (text or b"").split(b"\0") if word]


def _uses_gpu(pid: int) -> bool:
    try:
        files = (os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
        return any(name == GPU_FILE for name in files)
    except OSError:
        return False
