"""The checks behind `salus doctor`: each looks at one thing and says what it found and what to do about it.

Every check is one function that returns a `Finding`. None of them may change anything, start anything or make a CUDA
context; a check that fails itself is a finding too.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from salus import __version__
from salus.client.connection import ServiceConnection
from salus.config.load import load
from salus.config.schema import POLICY
from salus.config.variables import unknown_variables
from salus.errors import RequestRejected, SalusError, ServiceUnavailable
from salus.paths import check_socket, config_path, machine_config_path, runtime_dir, socket_path, state_dir
from salus.service.mps import CONTROL, find_control
from salus.units import format_bytes

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 9)
LITTLE_DISK_BYTES = 1 << 30


class Verdict(Enum):
    GOOD = "good"
    NOTE = "note"
    """Something is missing that one can do without."""
    BAD = "bad"
    """Jobs cannot be shared here until it is mended."""


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "system": _system,
        "settings": _settings,
        "service": _service,
        "socket": _socket_folder,
        "state": _state_folder,
        "PyTorch": _torch,
        "GPU driver": _driver,
        "GPU memory": _gpu_memory,
        "NVML": _nvml,
        "MPS": _mps,
        "plots": _plots,
    }
    findings = []
    for what, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:  # a check that stumbles must not hide the others
            findings.append(Finding(what, Verdict.NOTE, f"could not be checked ({type(error).__name__}: {error})"))
    return findings


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}, salus {__version__}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", Verdict.BAD, found, "install Python 3.10 or newer")
    return Finding("Python", Verdict.GOOD, found)


def _system() -> Finding:
    """What the client and the service are built on; Linux has all of it since 5.0 at the latest."""
    missing = [name for name in ("memfd_create", "eventfd") if not hasattr(os, name)]
    try:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left.close()
        right.close()
    except (OSError, AttributeError):
        missing.append("SOCK_SEQPACKET")
    found = f"{platform.system()} {platform.release()}, {os.cpu_count()} processors"
    if missing:
        return Finding("system", Verdict.BAD, f"{found}; it has no {', '.join(missing)}", "use a Linux of 5.4 or newer")
    return Finding("system", Verdict.GOOD, found)


def _settings() -> Finding:
    """Every command that runs a job reads them, and ends where they cannot be read."""
    try:
        settings = load()
    except SalusError as error:
        return Finding("settings", Verdict.BAD, str(error), "mend that line, or remove it")
    files = [str(path) for path in (machine_config_path(), config_path()) if path.exists()]
    unknown = unknown_variables(os.environ)
    if unknown:
        return Finding("settings", Verdict.NOTE, f"unknown: {', '.join(unknown)}", "salus config lists those there are")
    return Finding("settings", Verdict.GOOD, f"{', '.join(files) or 'none'}; policy {settings[POLICY]}")


def _service() -> Finding:
    path = socket_path()
    try:
        with ServiceConnection(path, 5.0) as connection:
            welcome = connection.welcome
    except ServiceUnavailable:
        return Finding("service", Verdict.GOOD, f"none runs at {path}; salus run starts one when it is needed")
    except SalusError as error:
        return Finding("service", Verdict.BAD, str(error), "stop it and start the one that is installed: salus serve")
    return Finding("service", Verdict.GOOD, f"process {welcome.pid} answers at {path}, salus {welcome.salus}")


def _socket_folder() -> Finding:
    folder = runtime_dir()
    try:
        check_socket(socket_path())
    except RequestRejected as error:
        fault, _, advice = str(error).rpartition("; ")
        return Finding("socket", Verdict.BAD, fault, advice)
    return _folder("socket", folder, "SALUS_RUNTIME_DIR")


def _state_folder() -> Finding:
    return _folder("state", state_dir(), "SALUS_STATE_DIR")


def _folder(what: str, folder: os.PathLike[str], setting: str) -> Finding:
    path = os.fspath(folder)
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if os.path.exists(path) and os.stat(path).st_uid != os.getuid():
        return Finding(what, Verdict.BAD, f"{path} belongs to another user", f"set {setting} to a folder of yours")
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return Finding(what, Verdict.BAD, f"{path} cannot be written", f"set {setting} to a folder of yours")
    free = shutil.disk_usage(there).free
    if not shutil.disk_usage(there).total:
        return Finding(what, Verdict.BAD, f"{path}: nothing can be kept there", f"set {setting} to a folder of yours")
    if free < LITTLE_DISK_BYTES:
        advice = f"make room, or set {setting} elsewhere; jobs go on when it is full, the journal does not"
        return Finding(what, Verdict.NOTE, f"{path}: only {format_bytes(free)} free", advice)
    return Finding(what, Verdict.GOOD, f"{path}, {format_bytes(free)} free")


def _torch() -> Finding:
    """Of the Python that Salus runs in; a job's own may be another."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        advice = "not needed here: jobs bring their own, from any environment; the demo wants it: pip install torch"
        return Finding("PyTorch", Verdict.NOTE, "not in this environment", advice)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        advice = "jobs are switched, but share no memory; install torch 2.9 or newer"
        return Finding("PyTorch", Verdict.NOTE, version, advice)
    return Finding("PyTorch", Verdict.GOOD, version)


def _driver() -> Finding:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(
            "GPU driver", Verdict.NOTE, "none (no libcuda.so.1)", "jobs share the CPU; install NVIDIA's driver"
        )
    status = cuda.cuInit(0)
    if status != 0:
        advice = "see nvidia-smi; in a container, give it the GPU (docker run --gpus all)"
        return Finding("GPU driver", Verdict.NOTE, f"it is there and finds no GPU (error {status})", advice)
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, GPUs: {count.value}"
    return Finding("GPU driver", Verdict.GOOD, found)


def _gpu_memory() -> Finding:
    """Lanes need physical memory that can be mapped in several processes."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("GPU memory", Verdict.NOTE, "there is no GPU to ask")
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return Finding("GPU memory", Verdict.NOTE, "there is no GPU to ask")
    lacking = []
    for index in range(count.value):
        device, value = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        for attribute in (102, 103):  # virtual memory management; handles as file descriptors
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            if not value.value:
                lacking.append(str(index))
    if lacking:
        found = f"GPU {', '.join(sorted(set(lacking)))} cannot share physical memory between processes"
        return Finding("GPU memory", Verdict.NOTE, found, "jobs are switched, but share no memory")
    return Finding("GPU memory", Verdict.GOOD, "can be shared between processes")


def _nvml() -> Finding:
    try:
        import pynvml
    except ImportError:
        return Finding(
            "NVML", Verdict.NOTE, "pynvml is not here", "memory of others is not seen: pip install nvidia-ml-py"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Finding("NVML", Verdict.NOTE, f"does not work ({error})")
    names = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else name
        names.append(f"{name}, {format_bytes(int(memory.free))} of {format_bytes(int(memory.total))} free")
    pynvml.nvmlShutdown()
    return Finding("NVML", Verdict.GOOD, "; ".join(names))


def _mps() -> Finding:
    found = find_control()
    if found is None:
        advice = "the driver slices time between jobs in different lanes; it comes with NVIDIA's driver"
        return Finding("MPS", Verdict.NOTE, f"{CONTROL} was not found", advice)
    return Finding("MPS", Verdict.GOOD, f"{found}; salus serve --mps on uses it")


def _plots() -> Finding:
    try:
        return Finding("plots", Verdict.GOOD, f"matplotlib {importlib.metadata.version('matplotlib')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("plots", Verdict.NOTE, "matplotlib is not here", "for pictures: pip install 'salus[plot]'")
