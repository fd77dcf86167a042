"""The command line: one file a command, put together here.

An error that a user can do something about is one line on stderr and exit status 2, never a traceback. A command of a
job that cannot be started ends with 127 or 126, as in a shell.
"""

from __future__ import annotations

import os

import typer

from salus import __version__
from salus.cli import (
    bench,
    change,
    clean,
    config,
    demo,
    doctor,
    hook,
    install_service,
    jobs,
    logs,
    marks,
    policy,
    ps,
    replay,
    run,
    serve,
    simulate,
    streams,
    top,
    usage,
)
from salus.errors import SalusError

# Typer has brought its own copy of click since 0.29, and needed click before: either way, the base of its usage errors.
_UsageFault: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

INTERRUPTED = 130
"""As a shell shows a death by Ctrl-C."""

SIGNALLED = 128
"""The status of what a signal ended is this and the number of the signal."""

app = typer.Typer(
    name="salus",
    help="Share one GPU among many unmodified deep-learning jobs, safely.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
for launcher in (run.run, run.submit):
    # What comes after the first word of the job's command belongs to that command.
    app.command(context_settings={"allow_interspersed_args": False})(launcher)
for command in (
    ps.ps,
    top.top,
    logs.logs,
    usage.usage,
    jobs.wait,
    jobs.cancel,
    change.pause,
    change.resume,
    policy.policy,
    serve.serve,
    install_service.install_service,
    doctor.doctor,
    marks.marks,
    hook.install_hook,
    simulate.simulate,
    demo.demo,
    replay.replay,
    clean.clean,
):
    app.command()(command)
app.command("set")(change.set_)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"salus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """The entry point of the `salus` program."""
    streams.prepare()
    streams.end(_run())


def _run() -> int:
    """Runs the command. What it ends with, after one line on stderr if it failed."""
    try:
        status = app(prog_name="salus", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SalusError as error:
        streams.say(str(error))
        return error.status
    except _UsageFault as error:
        message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
        if type(error).__name__ == "NoArgsIsHelpError":
            # A bare `salus` or `salus bench`. With rich, the help is on the screen by now.
            if message:
                typer.echo(message)
            return 0
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "salus"
        streams.say(f"{message}; see {path} --help")
    except (typer.Abort, KeyboardInterrupt):
        streams.say("interrupted")
        return INTERRUPTED
    except SystemExit as ended:
        # A command that a signal ended says which. Click ends with 1 when nobody reads its output.
        if isinstance(ended.code, int) and ended.code > SIGNALLED:
            return ended.code
    except OSError as error:
        if not streams.is_from_stdout(error):
            streams.say(_described(error))
    return 2


def _described(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        return "the working directory was deleted; go to another one, or name files with their whole path"
    return error.strerror or str(error)


def _is_somewhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
