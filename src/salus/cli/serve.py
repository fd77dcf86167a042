"""`salus serve`: the service, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from salus.cli.options import complete_policy, parsed
from salus.core.model import GpuConfig
from salus.errors import RequestRejected
from salus.paths import socket_path, state_dir
from salus.service.gpu import Gpu, Nvml, choose
from salus.service.registry import Registry
from salus.units import format_bytes, parse_bytes, parse_duration


def serve(
    policy: Annotated[
        str, typer.Option(help="Who runs when; see salus policy.", autocompletion=complete_policy)
    ] = "fair",
    quantum: Annotated[
        str, typer.Option(metavar="TIME", help="A lease lasts at least this long; 0 switches at every boundary.")
    ] = "20ms",
    device: Annotated[
        str, typer.Option(metavar="auto|cuda|host", help="What is shared: a GPU, or the processor where there is none.")
    ] = "auto",
    gpu: Annotated[
        str | None, typer.Option(metavar="N|UUID", help="Which GPU. Default: the one with the most free memory.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory to share, as on a smaller device. Default: all it has.")
    ] = None,
    reserve: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory to leave to others on the GPU, besides what they use already.")
    ] = "256MiB",
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the host for jobs that are paged out; 0: none are. Default: half of what is available.",
        ),
    ] = None,
    stuck_after: Annotated[
        str,
        typer.Option(metavar="TIME", help="A job that ends no iteration for this long holds nobody else up; 0: never."),
    ] = "60s",
    users: Annotated[
        str, typer.Option(metavar="NAMES|all", help="Other users who may run jobs here, separated by commas.")
    ] = "",
    visible: Annotated[bool, typer.Option("--visible", help="Let users see one another's jobs.")] = False,
    share_lanes_between_users: Annotated[
        bool,
        typer.Option(
            "--share-lanes-between-users", help="Jobs of several users in one lane; each clears what it leaves there."
        ),
    ] = False,
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Clear what a job leaves in its lane at every switch.")
    ] = False,
    journal: Annotated[bool, typer.Option(help="Keep a journal of every decision, for salus replay.")] = True,
    on_stop: Annotated[
        str, typer.Option(metavar="release|drain", help="What SIGTERM does: jobs go on unmanaged, or are waited for.")
    ] = "release",
    linger: Annotated[bool, typer.Option("--linger", help="End when the last job has.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what happens.")] = False,
) -> None:
    """Run the service that shares the device. `salus run` starts one by itself when there is none.

    Example: `salus serve --policy srtf --quantum 50ms`
    """
    from salus.service.server import Options, Server

    if on_stop not in ("release", "drain"):
        raise RequestRejected(f"--on-stop: {on_stop!r} is not understood; expected release or drain")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="salus: %(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    chosen = _without_our_jobs(_choose(device, gpu))
    room_bytes = _room(chosen, parsed("--reserve", parse_bytes, reserve))
    size = _size(chosen, capacity, room_bytes)
    options = Options(
        socket=socket_path(),
        state=state_dir(),
        config=GpuConfig(
            capacity_bytes=size,
            quantum_s=parsed("--quantum", parse_duration, quantum),
            host_bytes=_host_bytes(host_memory),
            share_lanes_between_users=share_lanes_between_users,
        ),
        gpu=chosen,
        room_bytes=room_bytes,
        policy=policy,
        journal=journal,
        linger=linger,
        users=_users(users),
        visible=visible,
        scrub=scrub,
        stuck_after_s=parsed("--stuck-after", parse_duration, stuck_after),
        on_stop=on_stop,
    )

    def started() -> None:
        what = "the processor" if chosen is None else f"{chosen.name} ({chosen.uuid})"
        typer.echo(f"salus: serves {what} on {options.socket}: {format_bytes(size)}, policy {policy}", err=True)

    async def serve_until_told() -> int:
        return await Server(options).run(started)

    raise typer.Exit(asyncio.run(serve_until_told()))


def _choose(device: str, wanted: str | None) -> Gpu | None:
    """None: the host device."""
    if device not in ("auto", "cuda", "host"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected auto, cuda or host")
    if device == "host":
        return None
    found = choose(Nvml().gpus(), wanted)
    if found is None and device == "cuda":
        raise RequestRejected("--device: there is no GPU here; salus doctor says more")
    return found


def _without_our_jobs(gpu: Gpu | None) -> Gpu | None:
    """After a restart, jobs of the service before are on the GPU: what they use is ours, and not others'."""
    saved = state_dir() / "jobs.sqlite"
    if gpu is None or not saved.exists():
        return gpu
    registry = Registry(saved)
    pids = {job.worker for job in registry.all()}
    registry.close(forget=False)
    ours = sum(size for pid, size in Nvml().used_by(gpu).items() if pid in pids)
    return replace(gpu, used_bytes=max(0, gpu.used_bytes - ours))


def _room(gpu: Gpu | None, reserve_bytes: int) -> int:
    if gpu is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return gpu.total_bytes - gpu.used_bytes - reserve_bytes


def _users(names: str) -> frozenset[int] | None:
    """Their numbers; None: everyone."""
    if names == "all":
        return None
    found = set()
    for name in filter(None, names.split(",")):
        try:
            found.add(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise RequestRejected(f"--users: there is no user {name!r} here; write names separated by commas") from None
    return frozenset(found)


def _host_bytes(asked: str | None) -> int:
    if asked is not None:
        return parsed("--host-memory", parse_bytes, asked)
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // 2


def _size(gpu: Gpu | None, capacity: str | None, room_bytes: int) -> int:
    size = parsed("--capacity", parse_bytes, capacity) if capacity is not None else room_bytes
    if size <= 0:
        raise RequestRejected(f"--capacity: {format_bytes(max(size, 0))} is nothing to share; write it like 16GiB")
    # On the host device it is only a number to plan with; a GPU has what it has.
    return size if gpu is None else min(size, room_bytes)
