"""The standard streams of a command: output that cannot be written is one clear line, and never a traceback.

- A stream that is closed (`salus ps >&-`) takes everything and shows nothing.
- A terminal whose encoding lacks a letter shows a similar one, or a question mark.
- A device that is full, or gone, is found before the interpreter ends, where it would be a traceback.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TextIO

PIPE_CLOSED = 141
"""As a shell shows a death by SIGPIPE."""
_SUBSTITUTES = str.maketrans({"…": "~", "●": "*", "○": "o", "✓": "+", "✗": "x", "━": "-", "█": "#", "±": "~", "—": "-"})
"""For a terminal that knows only ASCII, a letter for a letter, so that tables keep their width."""
_HANDLER = "salus.substitute"


class _Descriptor(io.FileIO):
    """Remembers the first write that failed, also where a library catches the error."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise


def prepare() -> None:
    """Call this first: a descriptor that is opened before it might become the standard output."""
    _occupy_closed_descriptors()
    codecs.register_error(_HANDLER, _substitute)
    sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115 (for as long as the process lives)
    sys.stdout, sys.stderr = _remade(sys.stdout, 1), _remade(sys.stderr, 2)


def end(status: int) -> NoReturn:
    """Ends the command. Output that could not be written is a line on stderr and status 2, or 141 for a closed pipe."""
    error = _finish(sys.stdout)
    if isinstance(error, BrokenPipeError):
        # Nobody reads the output any more, as with `| head`. A shell's own commands end without a word, too.
        status = PIPE_CLOSED
    elif error is not None:
        say(f"the output cannot be written ({error.strerror}); make room there, or send it somewhere else")
        status = status or 2
    _finish(sys.stderr)
    sys.exit(status)


def say(message: str) -> None:
    """One line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"salus: {message}", file=sys.stderr, flush=True)


def is_from_stdout(error: OSError) -> bool:
    return error is _failure_of(sys.stdout)


def _finish(stream: TextIO) -> OSError | None:
    """Writes what is left. If that fails, it is dropped: the interpreter would try again when it ends, and complain."""
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno(), inheritable=False)
            os.close(null)
            stream.flush()
        return error
    return _failure_of(stream)


def _failure_of(stream: TextIO) -> OSError | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Descriptor) else None


def _remade(stream: TextIO | None, descriptor: int) -> TextIO:
    """The same stream, which takes every letter and remembers what failed. One that was closed goes nowhere."""
    raw = _Descriptor(os.devnull if stream is None else descriptor, "w", closefd=stream is None)
    encoding = "utf-8" if stream is None else stream.encoding
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding, _HANDLER, line_buffering=descriptor == 2 or raw.isatty())


def _occupy_closed_descriptors() -> None:
    """A descriptor closed to us is closed to a job, too: what takes its place here is not inherited."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end].translate(_SUBSTITUTES)
    return "".join(letter if letter.isascii() else "?" for letter in letters), error.end
