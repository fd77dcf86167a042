"""`salus run` and `salus submit`: a command becomes a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from salus.cli.options import option_of, parsed
from salus.client import launch
from salus.client.environment import visible_gpus
from salus.config.load import Settings, load
from salus.config.schema import GRACE, IF_NO_SERVICE, TIME_LIMIT
from salus.core.model import HEAVIEST, LIGHTEST
from salus.errors import RequestRejected
from salus.interpreter import python_command
from salus.names import LONGEST_NAME, check_job_name
from salus.paths import make_private, state_dir, take_over
from salus.processes import APART
from salus.protocol.messages import MOST, Register
from salus.units import parse_bytes, parse_duration

Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND [ARGS]...", help="The command, unchanged, with options of its own.")
]
Name = Annotated[str | None, typer.Option(help="What to call the job. Default: the script's name.")]
Priority = Annotated[
    int, typer.Option(min=-MOST, max=MOST, metavar="N", help="Larger is more urgent, under the policy priority.")
]
Weight = Annotated[
    float, typer.Option(help=f"Share of the device under the policy fair, {LIGHTEST:g} to {HEAVIEST:g}.")
]
Iterations = Annotated[int | None, typer.Option(min=1, help="How many iterations the job will do.")]
Duration = Annotated[str | None, typer.Option(metavar="TIME", help="Device time the whole job needs alone, like 30m.")]
Persistent = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory that lives across iterations, like 2GiB.")]
OnGpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="N|UUID", help="Which GPU, or several separated by commas. Default: one with room."),
]
SmShare = Annotated[
    int | None,
    typer.Option(
        "--sm-share",
        min=1,
        max=100,
        metavar="PERCENT",
        help="Of the GPU's processors, under MPS. Default: as many as it was seen to need, else all of them.",
    ),
]
Ephemeral = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory that lives within an iteration.")]
TimeLimit = Annotated[str | None, option_of(TIME_LIMIT)]
Grace = Annotated[str | None, option_of(GRACE)]


def run(
    command: Command,
    name: Name = None,
    priority: Priority = 0,
    weight: Weight = 1.0,
    iterations: Iterations = None,
    duration: Duration = None,
    persistent: Persistent = None,
    ephemeral: Ephemeral = None,
    gpu: OnGpu = None,
    sm_share: SmShare = None,
    time_limit: TimeLimit = None,
    grace: Grace = None,
    if_no_service: Annotated[str | None, option_of(IF_NO_SERVICE)] = None,
) -> None:
    """Run a command as a job that shares the device. Input, output, signals and exit status pass through.

    Options of Salus come before the command, those of the command after it. `--` between them is allowed.

    Example: `salus run python train.py`

    Example: `salus run --name big --weight 2 --ephemeral 4GiB python train.py --epochs 3`
    """
    asked = _ask(command, name, priority, weight, iterations, duration, persistent, ephemeral, gpu, sm_share)
    settings = load(options={IF_NO_SERVICE: if_no_service, TIME_LIMIT: time_limit, GRACE: grace})
    raise typer.Exit(launch.run(_with_end(asked, settings), unmanaged_if_none=settings[IF_NO_SERVICE] == "run"))


def submit(
    command: Command,
    name: Name = None,
    priority: Priority = 0,
    weight: Weight = 1.0,
    iterations: Iterations = None,
    duration: Duration = None,
    persistent: Persistent = None,
    ephemeral: Ephemeral = None,
    gpu: OnGpu = None,
    sm_share: SmShare = None,
    time_limit: TimeLimit = None,
    grace: Grace = None,
) -> None:
    """Run a command as a job in the background. Prints its id; its output is kept for `salus logs`.

    Options of Salus come before the command, those of the command after it. `--` between them is allowed.

    Example: `salus submit --name night python train.py --epochs 3`
    """
    outputs = make_private(take_over(state_dir(), "SALUS_STATE_DIR") / "output", "SALUS_STATE_DIR")
    log = outputs / f"{os.getpid()}-{os.urandom(4).hex()}.log"
    asked = _ask(command, name, priority, weight, iterations, duration, persistent, ephemeral, gpu, sm_share, str(log))
    asked = _with_end(asked, load(options={TIME_LIMIT: time_limit, GRACE: grace}))
    # A process of its own session stays with the job, whatever becomes of this terminal.
    process = subprocess.Popen(
        python_command("salus.cli.run", "supervise", json.dumps(asked.__dict__)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # It may be submitted from within a job, and is no part of that one.
        env={**os.environ, APART: "1"},
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    job_id = process.stdout.readline().strip()
    if not job_id:
        raise RequestRejected(process.stderr.read().strip().removeprefix("salus: ") or "the job could not be started")
    typer.echo(job_id)


def supervise() -> int:
    """What stays with a submitted job until its end."""
    return launch.run(Register(**json.loads(sys.argv[1])), announce=True)


def _ask(
    command: list[str],
    name: str | None,
    priority: int,
    weight: float,
    iterations: int | None,
    duration: str | None,
    persistent: str | None,
    ephemeral: str | None,
    gpu: str | None,
    sm_share: int | None,
    log: str | None = None,
) -> Register:
    if not command[0]:
        raise RequestRejected("the command is empty; write it after the options, like: salus run python train.py")
    if not LIGHTEST <= weight <= HEAVIEST:
        raise RequestRejected(
            f"--weight: {weight} is out of range; expected a number from {LIGHTEST:g} to {HEAVIEST:g}"
        )
    return Register(
        name=check_job_name(name) if name is not None else _name(command),
        command=command,
        directory=_directory(),
        priority=priority,
        weight=weight,
        iterations=iterations,
        duration_s=None if duration is None else parsed("--duration", parse_duration, duration),
        persistent_bytes=None if persistent is None else parsed("--persistent", parse_bytes, persistent),
        ephemeral_bytes=None if ephemeral is None else parsed("--ephemeral", parse_bytes, ephemeral),
        log=log,
        gpu=gpu,
        visible=visible_gpus(os.environ),
        sm_share=sm_share,
    )


def _directory() -> str:
    """The working directory, also one that was deleted: a command that can do without it runs."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd")


def _with_end(asked: Register, settings: Settings) -> Register:
    """And when the job is to end at the latest, and how."""
    return replace(asked, time_limit_s=settings[TIME_LIMIT] or None, grace_s=settings[GRACE])


def _name(command: list[str]) -> str:
    """`python -u train.py --lr 1` is train."""
    script = next((word for word in command[1:] if word.endswith(".py")), command[0])
    name = Path(script).stem or command[0]
    # A whole shell script may be one word of the command.
    return "".join(letter if letter.isprintable() else " " for letter in name)[:LONGEST_NAME]
