"""The GPU as NVML shows it: which there are, how large, and who uses how much. No CUDA context is made.

A GPU is known by its UUID. CUDA_VISIBLE_DEVICES is respected: what it hides does not exist.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from salus.errors import RequestRejected
from salus.service.utilization import Activity

BUSY, SMS = 1, 2
"""NVML's numbers for what is asked of a GPU's counters (GPM, from Hopper on)."""


@dataclass(frozen=True)
class Gpu:
    uuid: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    """By others, when we looked."""


class Nvml:
    """None of the answers is worth failing for: without NVML there is no GPU, and nobody's memory is known."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._samples: dict[str, Any] = {}
        """By GPU: its counters at the last look."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception:  # not installed, no driver, no GPU, a library that does not match: all the same to us
            pass

    def gpus(self) -> list[Gpu]:
        if self._nvml is None:
            return []
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            uuid, name = (_text(ask(handle)) for ask in (self._nvml.nvmlDeviceGetUUID, self._nvml.nvmlDeviceGetName))
            found.append(Gpu(uuid, index, name, int(memory.total), int(memory.used)))
        return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def used_by(self, gpu: Gpu) -> dict[int, int]:
        """Bytes on the GPU by process id, where the driver says."""
        if self._nvml is None:
            return {}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except Exception:
            return {}
        return {process.pid: int(process.usedGpuMemory or 0) for process in processes}

    def usage(self, gpu: Gpu) -> tuple[dict[int, int], int]:
        return self.used_by(gpu), self.used_bytes(gpu)

    def activity(self, gpu: Gpu) -> Activity | None:
        """Since the last time that it was asked. On an older GPU, which does not tell, all SMs of one that is busy."""
        if self._nvml is None:
            return None
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            if not self._has_counters(handle):
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                return Activity(busy, busy)
            return self._counted(handle, gpu.uuid)
        except Exception:
            return None

    def _has_counters(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except Exception:  # a pynvml, or a driver, from before there were any
            return False

    def _counted(self, handle: Any, uuid: str) -> Activity | None:
        nvml = self._nvml
        now = nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(handle, now)
        except Exception:
            nvml.nvmlGpmSampleFree(now)
            raise
        before = self._samples.pop(uuid, None)
        self._samples[uuid] = now
        if before is None:
            return None
        try:
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 2
            asked.sample1, asked.sample2 = before, now
            asked.metrics[0].metricId, asked.metrics[1].metricId = BUSY, SMS
            nvml.nvmlGpmMetricsGet(asked)
        finally:
            nvml.nvmlGpmSampleFree(before)
        if any(asked.metrics[number].nvmlReturn for number in range(2)):
            return None
        return Activity(*(min(1.0, max(0.0, asked.metrics[number].value / 100)) for number in range(2)))

    def used_bytes(self, gpu: Gpu) -> int:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)


def choose(gpus: list[Gpu], wanted: str | None) -> Gpu | None:
    """The GPU named by its number or its UUID, else the one with the most free memory; None if there is none."""
    if wanted is None:
        return max(gpus, key=lambda gpu: gpu.total_bytes - gpu.used_bytes, default=None)
    for gpu in gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return gpu
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise RequestRejected(f"--gpu: there is no GPU {wanted}; there are: {there}")


def choose_all(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """Those named, by numbers or UUIDs separated by commas, each once; else all."""
    if wanted is None:
        return gpus
    found = [choose(gpus, name.strip()) for name in wanted.split(",")]
    return [gpu for gpu in gpus if gpu in found]


def _visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    if setting is None:
        return gpus
    shown = []
    for entry in setting.split(","):
        match = next((g for g in gpus if entry == str(g.index) or (entry and g.uuid.startswith(entry))), None)
        if match is None:
            break  # as CUDA does: what follows an entry that is none is hidden
        if match not in shown:
            shown.append(match)
    return shown


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
