"""What a service shares: one GPU or several, or the processor. Each has its own memory, lanes and leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from salus.core.model import GpuConfig
from salus.errors import RequestRejected
from salus.service.gpu import Gpu


@dataclass(frozen=True)
class Device:
    config: GpuConfig
    gpu: Gpu | None = None
    """None: the processor."""
    number: int = 0
    room_bytes: int = 0
    """What there was to share when we looked."""

    @property
    def key(self) -> str:
        """By which a job that comes back after a restart finds it again."""
        return f"host{self.number}" if self.gpu is None else self.gpu.uuid

    @property
    def index(self) -> int | None:
        """As the driver counts; None: it is no GPU."""
        return None if self.gpu is None else self.gpu.index

    @property
    def title(self) -> str:
        return "the processor" if self.gpu is None else f"{self.gpu.name} ({self.gpu.uuid})"

    def is_called(self, name: str) -> bool:
        if self.gpu is None:
            return name in (str(self.number), self.key)
        # As CUDA_VISIBLE_DEVICES has it: a number, or the beginning of a UUID.
        return name == str(self.gpu.index) or (len(name) > 4 and self.gpu.uuid.startswith(name))


def allowed(devices: Sequence[Device], names: str | None, visible: str | None) -> list[int]:
    """Which of them a job may run on: those it names, and that its user lets it see."""
    everywhere = list(range(len(devices)))
    there = ", ".join(f"{_number(device)} ({device.key})" for device in devices)
    found = everywhere
    if names is not None:
        found = []
        for name in names.split(","):
            match = _called(devices, name)
            if match is None:
                raise RequestRejected(f"--gpu: this service has no GPU {name.strip():.60}; it shares: {there}")
            found.append(match)
    found = sorted(set(found))
    if visible is None or devices[0].gpu is None:
        return found
    left = [index for index in found if any(devices[index].is_called(name) for name in _shown(visible))]
    if not left:
        raise RequestRejected(
            f"CUDA_VISIBLE_DEVICES is {visible:.60}, which hides what this service shares: {there}; unset it"
        )
    return left


def _shown(setting: str) -> list[str]:
    """As CUDA reads it: what follows an entry that is none is hidden. We do not know of GPUs that we do not share."""
    names = [name.strip() for name in setting.split(",")]
    return list(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))


def _called(devices: Sequence[Device], name: str) -> int | None:
    return next((index for index, device in enumerate(devices) if device.is_called(name.strip())), None)


def _number(device: Device) -> int:
    return device.number if device.gpu is None else device.gpu.index
