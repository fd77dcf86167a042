"""`salus serve`: the service, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from salus.cli.options import complete_policy, parsed
from salus.core.model import GpuConfig
from salus.errors import RequestRejected
from salus.paths import socket_path, state_dir
from salus.registry import open_registry
from salus.service.devices import Device
from salus.service.gpu import Gpu, Nvml, choose_all
from salus.units import format_bytes, parse_bytes, parse_duration


def serve(
    policy: Annotated[
        str, typer.Option(help="Who runs when; see salus policy.", autocompletion=complete_policy)
    ] = "fair",
    quantum: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="A lease lasts at least this long, with a unit, like 20ms; longer between jobs that have taken turns "
            "for minutes. 0 switches at every boundary.",
        ),
    ] = "20ms",
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cuda|host",
            help="What is shared: the GPUs, or the processor where there is none; host:2 is as if there were two.",
        ),
    ] = "auto",
    gpu: Annotated[
        str | None, typer.Option(metavar="N|UUID", help="Which GPU, or several separated by commas. Default: all.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory to share on each, as on a smaller one. Default: all.")
    ] = None,
    reserve: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory to leave to others on the GPU, besides what they use already.")
    ] = "256MiB",
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the host for jobs that are paged out, divided among the GPUs; 0: none are. "
            "Default: half of what is available.",
        ),
    ] = None,
    stuck_after: Annotated[
        str,
        typer.Option(metavar="TIME", help="A job that ends no iteration for this long holds nobody else up; 0: never."),
    ] = "60s",
    mps: Annotated[
        str,
        typer.Option(
            metavar="off|auto|on",
            help="Run jobs side by side under NVIDIA MPS. Faster for small ones; but a fatal fault of one ends all.",
        ),
    ] = "off",
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
    if mps not in ("off", "auto", "on"):
        raise RequestRejected(f"--mps: {mps!r:.60} is not understood; expected off, auto or on")
    if mps == "on" and users:
        raise RequestRejected("--mps: MPS serves one user at a time; leave one of --mps and --users out")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="salus: %(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    reserve_bytes = parsed("--reserve", parse_bytes, reserve)
    chosen = _with_room([_without_our_jobs(one) for one in _choose(device, gpu)], reserve_bytes, named=gpu is not None)
    devices = []
    for number, one in enumerate(chosen):
        room_bytes = _room(one, reserve_bytes)
        config = GpuConfig(
            capacity_bytes=_size(one, capacity, room_bytes),
            quantum_s=parsed("--quantum", _parse_quantum, quantum),
            # To each its part: two that count on the same memory would both be wrong.
            host_bytes=_host_bytes(host_memory) // len(chosen),
            share_lanes_between_users=share_lanes_between_users,
        )
        devices.append(Device(config, one, number, room_bytes))
    options = Options(
        socket=socket_path(),
        state=state_dir(),
        devices=tuple(devices),
        policy=policy,
        journal=journal,
        linger=linger,
        users=_users(users),
        visible=visible,
        scrub=scrub,
        stuck_after_s=parsed("--stuck-after", parse_duration, stuck_after),
        on_stop=on_stop,
        mps="off" if users else mps,
    )

    def started() -> None:
        what = ", ".join(f"{one.title}: {format_bytes(one.config.capacity_bytes)}" for one in devices)
        typer.echo(f"salus: serves {what}; on {options.socket}, policy {policy}", err=True)

    async def serve_until_told() -> int:
        return await Server(options).run(started)

    raise typer.Exit(asyncio.run(serve_until_told()))


def _parse_quantum(text: str) -> float:
    """Who writes 20 means milliseconds, and a bare number would be seconds."""
    quantum_s = parse_duration(text)
    if quantum_s and not text.strip()[-1].isalpha():
        raise RequestRejected(f"{text!r} has no unit; write {quantum_s:g}ms or {quantum_s:g}s")
    return quantum_s


def _choose(device: str, wanted: str | None) -> list[Gpu | None]:
    """None: the host device."""
    kind, colon, count = device.partition(":")
    several = not colon or (kind == "host" and re.fullmatch("[1-9][0-9]?", count) is not None)
    if kind not in ("auto", "cuda", "host") or not several:
        raise RequestRejected(
            f"--device: {device!r:.60} is not understood; expected auto, cuda, host, or host:N with up to 99"
        )
    if kind == "host":
        if wanted is not None:
            raise RequestRejected("--gpu: with --device host there is none; leave one of the two out")
        return [None] * int(count or 1)
    found = choose_all(Nvml().gpus(), wanted)
    if not found and device == "cuda":
        raise RequestRejected("--device: there is no GPU here; salus doctor says more")
    return [*found] or [None]


def _with_room(gpus: list[Gpu | None], reserve_bytes: int, *, named: bool) -> list[Gpu | None]:
    """Not those that others have filled, unless they were asked for by name."""
    if named:
        return gpus
    found = [gpu for gpu in gpus if _room(gpu, reserve_bytes) > 0]
    for gpu in gpus:
        if gpu is not None and gpu not in found:
            typer.echo(f"salus: GPU {gpu.index} ({gpu.uuid}) is full; it is not shared", err=True)
    if not found:
        raise RequestRejected("every GPU here is full; end what runs there, or lower --reserve")
    return found


def _without_our_jobs(gpu: Gpu | None) -> Gpu | None:
    """After a restart, jobs of the service before are on the GPU: what they use is ours, and not others'."""
    if gpu is None:
        return None
    with open_registry(state_dir(), socket_path()) as registry:
        pids = set() if registry is None else {job.worker for job in registry.running()}
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
