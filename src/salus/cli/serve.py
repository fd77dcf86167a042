"""`salus serve`: the service, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salus import machine
from salus.cli.clean import limits_of
from salus.cli.options import complete_policy, option_of
from salus.config import schema
from salus.config.load import Settings, load, naming
from salus.core.model import GpuConfig
from salus.errors import RequestRejected
from salus.paths import socket_path, state_dir
from salus.registry import open_registry
from salus.service.access import access_of
from salus.service.caps import Caps
from salus.service.devices import Device
from salus.service.gpu import Gpu, Nvml, choose_all
from salus.service.systemd import tell_systemd
from salus.units import format_bytes

if TYPE_CHECKING:
    from salus.service.server import Options


def serve(
    policy: Annotated[str | None, option_of(schema.POLICY, autocompletion=complete_policy)] = None,
    quantum: Annotated[str | None, option_of(schema.QUANTUM)] = None,
    device: Annotated[str | None, option_of(schema.DEVICE)] = None,
    gpu: Annotated[str | None, option_of(schema.GPU)] = None,
    capacity: Annotated[str | None, option_of(schema.CAPACITY)] = None,
    reserve: Annotated[str | None, option_of(schema.RESERVE)] = None,
    host_memory: Annotated[str | None, option_of(schema.HOST_MEMORY)] = None,
    stuck_after: Annotated[str | None, option_of(schema.STUCK_AFTER)] = None,
    mps: Annotated[str | None, option_of(schema.MPS)] = None,
    users: Annotated[str | None, option_of(schema.USERS)] = None,
    visible: Annotated[bool | None, option_of(schema.VISIBLE)] = None,
    share_lanes_between_users: Annotated[bool | None, option_of(schema.SHARE_LANES)] = None,
    scrub: Annotated[bool | None, option_of(schema.SCRUB)] = None,
    journal: Annotated[bool | None, option_of(schema.JOURNAL)] = None,
    journal_size: Annotated[str | None, option_of(schema.JOURNAL_SIZE)] = None,
    output_size: Annotated[str | None, option_of(schema.OUTPUT_SIZE)] = None,
    keep_for: Annotated[str | None, option_of(schema.KEEP_FOR)] = None,
    on_stop: Annotated[str | None, option_of(schema.ON_STOP)] = None,
    linger: Annotated[bool | None, option_of(schema.LINGER)] = None,
    verbose: Annotated[bool | None, option_of(schema.VERBOSE, short="-v")] = None,
    system: Annotated[
        bool, typer.Option("--system", help="Serve every user of this machine; run by root or a user for that alone.")
    ] = False,
) -> None:
    """Run the service that shares the device. `salus run` starts one by itself when there is none.

    What is not given as an option is taken from the settings; see `salus config`.

    Example: `salus serve --policy srtf --quantum 50ms`

    Example: `sudo salus serve --system`
    """
    settings = load(
        machine_wide=system,
        options={
            schema.POLICY: policy,
            schema.QUANTUM: quantum,
            schema.DEVICE: device,
            schema.GPU: gpu,
            schema.CAPACITY: capacity,
            schema.RESERVE: reserve,
            schema.HOST_MEMORY: host_memory,
            schema.STUCK_AFTER: stuck_after,
            schema.MPS: mps,
            schema.USERS: users,
            schema.VISIBLE: visible,
            schema.SHARE_LANES: share_lanes_between_users,
            schema.SCRUB: scrub,
            schema.JOURNAL: journal,
            schema.JOURNAL_SIZE: journal_size,
            schema.OUTPUT_SIZE: output_size,
            schema.KEEP_FOR: keep_for,
            schema.ON_STOP: on_stop,
            schema.LINGER: linger,
            schema.VERBOSE: verbose,
        },
    )
    raise typer.Exit(asyncio.run(_serve(settings)))


async def _serve(settings: Settings) -> int:
    from salus.service.server import Server

    logging.basicConfig(
        level=logging.INFO if settings[schema.VERBOSE] else logging.WARNING,
        format="salus: %(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    options = _options(settings)

    def started() -> None:
        what = ", ".join(f"{one.title}: {format_bytes(one.config.capacity_bytes)}" for one in options.devices)
        typer.echo(f"salus: serves {what}; on {options.socket}, policy {options.policy}", err=True)
        tell_systemd("READY=1")

    return await Server(options).run(started)


def _options(settings: Settings) -> Options:
    from salus.service.server import Options

    names = settings[schema.USERS]
    with naming(settings, schema.USERS):
        access = access_of(names)
    mps = settings[schema.MPS]
    if mps == "on" and access.for_others:
        raise RequestRejected(
            f"{settings.label(schema.MPS)}: MPS serves one user at a time; leave one of --mps and --users out"
        )
    socket, state = _places(settings.machine_wide)
    return Options(
        socket=socket,
        state=state,
        devices=_devices(settings, socket, state),
        policy=settings[schema.POLICY],
        journal=settings[schema.JOURNAL],
        limits=limits_of(settings),
        caps=Caps(settings.limits, lambda keys: str(settings.source_of(keys))),
        linger=settings[schema.LINGER],
        access=access,
        machine_wide=settings.machine_wide,
        visible=settings[schema.VISIBLE],
        scrub=settings[schema.SCRUB],
        stuck_after_s=settings[schema.STUCK_AFTER],
        on_stop=settings[schema.ON_STOP],
        mps="off" if access.for_others else mps,
    )


def _places(machine_wide: bool) -> tuple[Path, Path]:
    """The socket, and the folder for everything that is kept."""
    if machine_wide:
        return machine.socket_path(), machine.state_dir()
    if socket_path() == machine.socket_path():
        raise RequestRejected(
            f"this machine has a service for all users ({machine.socket_path()}), and your commands use that; "
            "with SALUS_SERVICE=own, also for those commands, you run one of your own beside it"
        )
    return socket_path(), state_dir()


def _devices(settings: Settings, socket: Path, state: Path) -> tuple[Device, ...]:
    reserve_bytes = settings[schema.RESERVE]
    found = [_without_our_jobs(one, socket, state) for one in _choose(settings)]
    chosen = _with_room(found, reserve_bytes, named=settings.get(schema.GPU) is not None)
    devices = []
    for number, one in enumerate(chosen):
        room_bytes = _room(one, reserve_bytes)
        config = GpuConfig(
            capacity_bytes=_capacity(one, settings, room_bytes),
            quantum_s=settings[schema.QUANTUM],
            # To each its part: two that count on the same memory would both be wrong.
            host_bytes=_host_bytes(settings.get(schema.HOST_MEMORY)) // len(chosen),
            share_lanes_between_users=settings[schema.SHARE_LANES],
        )
        devices.append(Device(config, one, number, room_bytes))
    return tuple(devices)


def _choose(settings: Settings) -> list[Gpu | None]:
    """None: the host device."""
    kind, _, count = settings[schema.DEVICE].partition(":")
    wanted = settings.get(schema.GPU)
    if kind == "host":
        if wanted is not None:
            raise RequestRejected(
                f"{settings.label(schema.GPU)}: with --device host there is none; leave one of the two out"
            )
        return [None] * int(count or 1)
    found = choose_all(Nvml().gpus(), wanted)
    if not found and kind == "cuda":
        raise RequestRejected(f"{settings.label(schema.DEVICE)}: there is no GPU here; salus doctor says more")
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


def _without_our_jobs(gpu: Gpu | None, socket: Path, state: Path) -> Gpu | None:
    """After a restart, jobs of the service before are on the GPU: what they use is ours, and not others'."""
    if gpu is None:
        return None
    with open_registry(state, socket) as registry:
        pids = set() if registry is None else {job.worker for job in registry.running()}
    ours = sum(size for pid, size in Nvml().used_by(gpu).items() if pid in pids)
    return replace(gpu, used_bytes=max(0, gpu.used_bytes - ours))


def _room(gpu: Gpu | None, reserve_bytes: int) -> int:
    if gpu is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return gpu.total_bytes - gpu.used_bytes - reserve_bytes


def _host_bytes(asked: int | None) -> int:
    """Without a setting: half of what is available."""
    if asked is not None:
        return asked
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // 2


def _capacity(gpu: Gpu | None, settings: Settings, room_bytes: int) -> int:
    asked = settings.get(schema.CAPACITY)
    size = room_bytes if asked is None else asked
    if size <= 0:
        raise RequestRejected(
            f"{settings.label(schema.CAPACITY)}: {format_bytes(max(size, 0))} is nothing to share; write it like 16GiB"
        )
    # On the host device it is only a number to plan with; a GPU has what it has.
    return size if gpu is None else min(size, room_bytes)
