"""The command line: one file a command, put together here.

An error that a user can do something about is one line on stderr and exit status 2, never a traceback. A command of a
job that cannot be started ends with 127 or 126, as in a shell.
"""

from __future__ import annotations

import sys

import typer

from salus import __version__
from salus.cli import bench, config, demo, doctor, jobs, policy, replay, run, serve, simulate, top
from salus.errors import SalusError

# Typer has brought its own copy of click since 0.29, and needed click before: either way, the base of its usage errors.
_UsageFault: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="salus",
    help="Share one GPU among many unmodified deep-learning jobs, safely.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
for command in (
    run.run,
    run.submit,
    jobs.ps,
    top.top,
    jobs.logs,
    jobs.wait,
    jobs.cancel,
    policy.policy,
    serve.serve,
    doctor.doctor,
    simulate.simulate,
    demo.demo,
    replay.replay,
):
    app.command()(command)
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
    try:
        status = app(prog_name="salus", standalone_mode=False)
    except SalusError as error:
        _fail(str(error), error.status)
    except _UsageFault as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "salus"
        message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
        _fail(f"{message}; see {path} --help")
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does. Closing stderr keeps the interpreter quiet about it.
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> None:
    print(f"salus: {message}", file=sys.stderr)
    sys.exit(status)
