"""Starts a job: registers it, prepares its environment, passes everything through, reports its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from salus.client.again import connect_again
from salus.client.connection import ServiceConnection
from salus.client.say import say
from salus.errors import CommandNotStarted, NoService, RequestRejected, SalusError, ServiceUnavailable
from salus.paths import lock_path, socket_path, state_dir, take_over
from salus.protocol import messages as msg
from salus.registry import open_registry

HIDES_ALL = ("", "-1", "none", "NoDevFiles", "void")
"""Settings of CUDA_VISIBLE_DEVICES with which there is no GPU."""
START_TIMEOUT_S = 10.0
END_TIMEOUT_S = 2.0
START_ATTEMPTS = 3
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_TAKEN = (*PASSED_ON, signal.SIGCHLD)
FROM_KEYS = (signal.SIGINT, signal.SIGQUIT)
SI_KERNEL = 0x80
"""As the sender of a signal: the kernel, on behalf of the terminal."""
LOOK_S = 0.5
"""How often it is looked whether the job has ended where no signal says so, as in a thread."""


def connect(*, start: bool, timeout_s: float | None = 10.0) -> ServiceConnection:
    """A connection to the user's service. With `start`, one is started if there is none; it ends with its last job."""
    path = socket_path()
    try:
        return ServiceConnection(path, timeout_s)
    except ServiceUnavailable:
        if not start:
            raise
    log, service = _start_service(path)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = service.poll() is not None
        try:
            return ServiceConnection(path, timeout_s)
        except ServiceUnavailable:
            if ended and not _another_starts(path):
                raise ServiceUnavailable(f"a service was started and has ended: {_last_line(log)}") from None
            time.sleep(0.02)
    raise ServiceUnavailable(f"a service was started and does not answer; see {log}")


def _another_starts(path: Path) -> bool:
    """Ours has found one that was there before it, and is about to answer."""
    try:
        os.kill(int(lock_path(path).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1].removeprefix("salus: ") if lines else f"see {log}"


def _start_service(path: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    log = state_dir() / "service.log"
    try:
        take_over(log.parent, "SALUS_STATE_DIR")
        with log.open("ab") as output:
            command = [sys.executable, "-m", "salus", "serve", "--linger"]
            environment = {**os.environ, "SALUS_SOCKET": str(path)}
            if environment.get("CUDA_VISIBLE_DEVICES") not in HIDES_ALL:
                # What one job may see is not what the service may share.
                environment.pop("CUDA_VISIBLE_DEVICES", None)
            service = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )
    except RequestRejected as error:
        raise ServiceUnavailable(str(error)) from None
    except OSError as error:
        raise ServiceUnavailable(
            f"{log}: cannot be written ({error.strerror}); set SALUS_STATE_DIR to a folder of yours"
        ) from None
    return log, service


def visible_gpus(environment: Mapping[str, str]) -> str | None:
    """Those that the user lets the job see; None: all."""
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    return None if setting in HIDES_ALL else setting


def environment_for(job: msg.Registered, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the adaptor loads by itself, in the process and in its children."""
    bootstrap = str(Path(__file__).parent.parent / "adaptors" / "bootstrap")
    others = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != bootstrap]
    # One that may see no GPU at all is to run without.
    hidden = base.get("CUDA_VISIBLE_DEVICES") in HIDES_ALL
    placed = {} if job.gpu is None or hidden else {"CUDA_VISIBLE_DEVICES": job.gpu}
    return {
        **base,
        **placed,
        "PYTHONPATH": os.pathsep.join([bootstrap, *others]),
        "SALUS_SOCKET": str(socket_path()),
        "SALUS_JOB": job.job_id,
        "SALUS_BOOTSTRAP": os.path.join(bootstrap, "sitecustomize.py"),
        **({} if job.gpu is None else {"SALUS_GPU": job.gpu}),
        **_mps(job),
        "SALUS_TOKEN": job.token,
    }


def _mps(job: msg.Registered) -> dict[str, str]:
    settings = {
        "CUDA_MPS_PIPE_DIRECTORY": job.mps_pipe,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": job.sm_share,
        "CUDA_MPS_CLIENT_PRIORITY": job.mps_priority,
    }
    return {name: str(value) for name, value in settings.items() if job.mps_pipe is not None and value is not None}


def run(asked: msg.Register, *, announce: bool = False, unmanaged_if_none: bool = False) -> int:
    """Runs a job to its end and gives back its exit status, as a shell would: 128 and the signal that killed it."""
    try:
        connection, job = _register(asked)
    except ServiceUnavailable as error:
        if not unmanaged_if_none:
            raise
        say(f"{error}; {asked.name} runs unmanaged")
        placed = {} if asked.gpu is None else {"CUDA_VISIBLE_DEVICES": asked.gpu}
        with _Signals() as signals:
            return as_shell_status(signals.wait_for(_start(asked.command, {**os.environ, **placed}, signals)))
    if asked.sm_share is not None and job.mps_pipe is None:
        say(f"job {job.job_id}: --sm-share has no effect: the service runs without MPS (salus serve --mps on)")
    output = None if asked.log is None else _open_log(Path(asked.log))
    if announce:
        print(job.job_id, flush=True)
    if output is not None:
        # For what the job writes, and for what is said to it.
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
    with _Signals() as signals:
        try:
            process = _start(asked.command, environment_for(job, os.environ), signals)
        except CommandNotStarted as error:
            with contextlib.suppress(SalusError):
                connection.send(msg.Finished(error.status))
            connection.close()
            raise
        listener = _Listener(connection, process, job)
        listener.start()
        status = signals.wait_for(process)
        listener.finish(status)
    return as_shell_status(status)


def _register(asked: msg.Register) -> tuple[ServiceConnection, msg.Registered]:
    for left in reversed(range(START_ATTEMPTS)):
        connection = connect(start=True)
        try:
            job: msg.Registered = connection.request(asked)
        except NoService:
            # It was about to end when we came.
            if not left:
                raise
        else:
            connection.wait_for_ever()
            return connection, job
    raise AssertionError(START_ATTEMPTS)


def as_shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RequestRejected(
            f"{path}: cannot be written ({error.strerror}); make room, or set SALUS_STATE_DIR"
        ) from None


def _start(command: list[str], environment: dict[str, str], signals: _Signals) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=environment, preexec_fn=signals.as_before)
    except OSError as error:
        raise _not_started(command[0], error) from None


def _not_started(name: str, error: OSError) -> CommandNotStarted:
    is_script = name.endswith(".py") and Path(name).is_file()
    advice = f"; write: {shlex.join(['python', name])}" if is_script else ""
    status = 127 if isinstance(error, FileNotFoundError) else 126
    return CommandNotStarted(f"{name}: cannot be run ({error.strerror}){advice}", status)


class _Signals:
    """Signals to this process are the job's: they are blocked here, in every thread that starts within, and passed on.

    But for what somebody types, as Ctrl-C: that goes to the job too, which is in the same group.
    """

    def __enter__(self) -> _Signals:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        # Where it is ignored, nobody hears of the job's end, nor how it ended.
        self._ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN and _is_main_thread()
        if self._ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def as_before(self) -> None:
        """In the job, before it begins."""
        if self._ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait_for(self, process: subprocess.Popen[bytes]) -> int:
        while (status := process.poll()) is None:
            came = signal.sigtimedwait(_TAKEN, LOOK_S)
            typed = came is not None and came.si_signo in FROM_KEYS and came.si_code == SI_KERNEL
            if came is not None and came.si_signo in PASSED_ON and not typed:
                process.send_signal(came.si_signo)
        return status

    def __exit__(self, *_: object) -> None:
        # What came for a job that has ended is nobody's.
        while signal.sigtimedwait(_TAKEN, 0) is not None:
            pass
        self.as_before()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Listener(threading.Thread):
    """What the service has to say to the launcher, until it confirms the end. One that was killed is waited for."""

    def __init__(self, connection: ServiceConnection, process: subprocess.Popen[bytes], job: msg.Registered) -> None:
        super().__init__(daemon=True)
        self._connection, self._process, self._job = connection, process, job
        self._status: int | None = None
        self._known = False
        """The service has heard how it ended."""

    def run(self) -> None:
        while True:
            try:
                self._hear(self._connection)
                return
            except (SalusError, OSError):
                connection = connect_again(socket_path())
            try:
                if connection is None:
                    return
                connection.request(msg.Rejoin(self._job.job_id, self._job.token))
                connection.wait_for_ever()
            except ServiceUnavailable:
                continue  # killed again
            except SalusError:
                return  # it does not know the job any more
            self._connection = connection
            if self._status is not None:
                self._tell_end()

    def finish(self, status: int) -> None:
        self._status = status
        self._tell_end()
        # When the answer is there, the service knows, and `salus ps` tells the truth.
        self.join(timeout=END_TIMEOUT_S)
        self._connection.close()
        if not self._known:
            # Where the service is gone, or another's, this is all that can be done.
            with contextlib.suppress(SalusError, OSError), open_registry(state_dir(), socket_path()) as registry:
                if registry is not None:
                    registry.finish(self._job.job_id, self._job.token, status)

    def _tell_end(self) -> None:
        assert self._status is not None
        with contextlib.suppress(SalusError):
            self._connection.send(msg.Finished(self._status))

    def _hear(self, connection: ServiceConnection) -> None:
        job_id = self._job.job_id
        while True:
            message, _ = connection.receive()
            match message:
                case msg.Queued(_, text, position, queue_length):
                    say(f"job {job_id} waits for memory, {position} of {queue_length} in the queue: {text}")
                case msg.Told(text):
                    say(text)
                case msg.Admitted():
                    say(f"job {job_id} has its memory")
                case msg.Terminate(force):
                    self._process.send_signal(signal.SIGKILL if force else signal.SIGTERM)
                case msg.Done():
                    self._known = True
                    return
                case msg.Farewell():
                    return
