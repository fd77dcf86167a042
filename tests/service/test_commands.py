"""`salus run`, `submit` and the commands around them, as a person at a terminal meets them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from salus.protocol import messages as msg
from tests.service.harness import SOURCE, eventually, finish

FIELDS = {
    "id", "name", "user", "state", "wait_reason", "lane", "priority", "weight", "iterations", "gpu_time_s",
    "persistent_bytes", "ephemeral_bytes", "submitted_at", "started_at", "finished_at", "exit_code",
}  # fmt: skip


def test_input_output_and_exit_status_pass_through(serve):
    service = serve()
    code = "import sys; print(sys.stdin.read().upper()); print('oops', file=sys.stderr); sys.exit(7)"
    done = service.salus("run", "--", sys.executable, "-c", code, stdin="hello")
    assert (done.returncode, done.stdout, done.stderr) == (7, "HELLO\n", "oops\n")


def test_signals_pass_through_and_a_death_by_signal_shows_as_a_shell_shows_it(serve):
    service = serve()
    job = service.salus_in_background("run", "--name", "s", "--", "sleep", "60")
    service.when("s", "starting")
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=10) == 128 + signal.SIGTERM
    assert service.jobs()["s"]["exit_code"] == -signal.SIGTERM


COUNTS = """
import signal, sys, time
came = []
signal.signal(signal.SIGINT, lambda *_: came.append(1))
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    time.sleep(0.05)
print("interrupted", len(came))
"""


def test_an_interrupt_that_another_process_sends_passes_through(serve):
    service = serve()
    job = service.salus_in_background("run", "--", sys.executable, "-c", COUNTS, "1.5")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=20)[0] == "interrupted 1\n" and job.returncode == 0


def on_a_terminal(service, *arguments):
    """`salus` at a terminal of its own; the other end of that."""

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # Whoever runs the tests may ignore it (nohup), and what a caller ignores stays so.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "salus", *arguments],
        env=service.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    return process, ours


def test_ctrl_c_reaches_the_job_once(serve):
    job, terminal = on_a_terminal(serve(), "run", "--", sys.executable, "-c", COUNTS, "1.5")
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    assert job.wait(timeout=20) == 0
    seen += os.read(terminal, 1000)
    os.close(terminal)
    assert b"interrupted 1" in seen, seen


def test_a_terminal_that_goes_away_ends_the_job(serve):
    service = serve()
    job, terminal = on_a_terminal(service, "run", "--", "sleep", "60")
    service.when("sleep", "starting")
    time.sleep(0.3)
    os.close(terminal)
    assert job.wait(timeout=20) == 128 + signal.SIGHUP


def test_signals_that_the_caller_blocks_or_ignores_stay_so_for_the_job_and_its_end_is_seen(serve):
    service = serve()
    code = (
        "import signal; print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN, "
        "signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []), "
        "signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])); raise SystemExit(3)"
    )

    def as_the_caller_likes() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    done = subprocess.run(
        [sys.executable, "-m", "salus", "run", "--", sys.executable, "-c", code],
        env=service.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        preexec_fn=as_the_caller_likes,
    )
    assert (done.returncode, done.stdout) == (3, "True True False\n")


def test_run_starts_a_service_by_itself_and_that_one_ends_after_its_last_job(serve):
    service = serve(start=False)
    done = service.salus("run", "--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    eventually(lambda: not service.socket.exists(), "the service ended")


def test_a_command_that_is_not_there_is_one_clear_line_and_a_shells_status(serve):
    service = serve()
    done = service.salus("run", "--name", "a", "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "salus: no-such-command: cannot be run (No such file or directory)\n"
    eventually(lambda: service.jobs()["a"]["exit_code"] == 127, "the service knows the status")


def test_a_script_that_may_not_be_executed_ends_as_in_a_shell_and_is_told_how_to_run(serve, tmp_path):
    service = serve()
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    script.chmod(0o644)
    line = f"salus: {script}: cannot be run (Permission denied); write: python {script}\n"
    done = service.salus("run", "--name", "a", "--", str(script))
    assert (done.returncode, done.stderr) == (126, line)
    eventually(lambda: service.jobs()["a"]["exit_code"] == 126, "the service knows the status")
    other = script.rename(tmp_path / "train")
    done = service.salus("run", "--", str(other))
    assert (done.returncode, done.stderr) == (126, f"salus: {other}: cannot be run (Permission denied)\n")


def test_a_submitted_command_that_cannot_be_run_says_why_in_its_log(serve):
    service = serve()
    job_id = service.salus("submit", "--", "no-such-command").stdout.strip()
    assert service.salus("wait", job_id).returncode == 127
    assert service.salus("logs", job_id).stdout == (
        "salus: no-such-command: cannot be run (No such file or directory)\n"
    )


def test_while_a_job_waits_for_memory_its_launcher_says_why_and_where_in_the_queue(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    service.job("--name", "first", "--persistent", "3GiB", iterations=400, seconds=0.005)
    service.when("first", "running")
    second = service.job("--name", "second", "--persistent", "3GiB", iterations=2, seconds=0.001)
    waiting = service.when("second", "waiting")
    assert waiting["position"] == 1
    output, errors = second.communicate(timeout=60)
    assert "finished" in output
    assert "waits for memory, 1 of 1 in the queue: needs 3 GiB; 1 GiB of 4 GiB are free" in errors


def test_a_launcher_hears_of_the_queue_again_only_when_its_place_or_the_reason_changes(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    with service.connect() as first, service.connect() as second, service.connect() as third:
        for name, connection in (("first", first), ("second", second)):
            connection.request(msg.Register(name, ["x"], "/", persistent_bytes=3 << 30))
        assert second.receive()[0].position == 1
        third.request(msg.Register("third", ["x"], "/", persistent_bytes=3 << 30))
        assert third.receive()[0].position == 2
        first.send(msg.Finished(0))
        assert isinstance(second.receive()[0], msg.Admitted), "that the queue grew is no news to the second"
        assert third.receive()[0].position == 1


def test_who_waits_for_memory_has_a_place_in_ps_and_top(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    for name in ("first", "second", "third"):
        service.job("--name", name, "--persistent", "3GiB", iterations=100_000, seconds=0.005)
        service.when(name, "running", "waiting")
    for shown in (service.salus("ps").stdout, service.salus("top", "--once", "--interval", "0.1").stdout):
        assert "place 1: needs 3 GiB; 1 GiB of 4 GiB are free" in shown
        assert "place 2: needs 3 GiB; 1 GiB of 4 GiB are free" in shown
        assert "place 3" not in shown


def test_what_looks_like_markup_in_a_name_is_shown_as_it_is(serve):
    service = serve()
    service.job("--name", "[/x] [red]:ok:", iterations=100_000, seconds=0.005)
    service.when("[/x] [red]:ok:", "running")
    for shown in (service.salus("ps"), service.salus("top", "--once", "--interval", "0.1")):
        assert "[/x] [red]:ok:" in shown.stdout, shown.stderr


def test_what_a_client_of_somebodys_own_making_registers_does_no_harm_to_a_terminal(serve):
    service = serve()
    with service.connect() as connection:
        connection.request(msg.Register("a\x1b[2Jb\nc", ["true", "\x1b]0;x\x07"], "/"))
        (row,) = connection.jobs()
    assert row["name"] == "a [2Jb c" and row["command"].isprintable()


def test_submit_logs_wait_and_cancel(serve):
    service = serve()
    job = [sys.executable, "-u", "-c", "print('hello'); import sys; sys.exit(3)"]
    submitted = service.salus("submit", "--name", "night", "--", *job)
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    assert service.salus("wait", job_id).returncode == 3
    assert service.salus("logs", job_id).stdout == "hello\n"
    assert service.salus("logs", "-f", job_id).stdout == "hello\n"
    long = service.salus("submit", "--name", "long", "--", "sleep", "600").stdout.strip()
    assert service.salus("cancel", long).stdout == f"job {long} was told to end\n"
    assert service.salus("wait", long).returncode == 128 + signal.SIGTERM
    assert service.jobs()["long"]["state"] == "cancelled"
    hard = service.salus("submit", "--name", "hard", "--", "sleep", "600").stdout.strip()
    assert service.salus("cancel", "--force", hard).stdout == f"job {hard} was killed\n"
    assert service.salus("wait", hard).returncode == 128 + signal.SIGKILL
    again = service.salus("cancel", long)
    assert again.returncode == 2
    assert "has ended already" in again.stderr


def test_ps_lists_every_field_and_without_all_only_what_runs(serve):
    service = serve()
    job = service.job("--name", "a", "--priority", "3", "--weight", "2", iterations=800, seconds=0.005)
    service.when("a", "running")
    (row,) = json.loads(service.salus("ps", "--json").stdout)
    assert set(row) >= FIELDS
    assert (row["name"], row["priority"], row["weight"], row["state"]) == ("a", 3, 2.0, "running")
    assert "running" in service.salus("ps").stdout
    finish(job)
    assert json.loads(service.salus("ps", "--json").stdout) == []
    (row,) = json.loads(service.salus("ps", "--json", "--all").stdout)
    assert (row["state"], row["iterations"], row["exit_code"]) == ("done", 800, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--ephemeral", "much", "--", "true"], "--ephemeral: 'much' is not a size"),
        (["run", "--duration", "soon", "--", "true"], "--duration: 'soon' is not a time"),
        (["run", "--weight", "0", "--", "true"], "--weight: 0.0 is out of range"),
        (["run", "--name", "", "--", "true"], "--name: it is empty"),
        (["run", "--name", "a\nb", "--", "true"], r"--name: 'a\nb' has characters that do not print"),
        (["submit", "--name", "\x1b[31m", "--", "true"], r"--name: '\x1b[31m' has characters that do not print"),
        (["run", "--name", "x" * 201, "--", "true"], "--name: 201 characters are too many; write at most 200"),
        (["serve", "--quantum", "20"], "--quantum: '20' has no unit; write 20ms or 20s"),
        (["serve", "--quantum", "soon"], "--quantum: 'soon' is not a time"),
        (["serve", "--on-stop", "explode"], "--on-stop: 'explode' is not understood"),
        (["policy", "fare"], "there is no policy 'fare'"),
        (["replay", "/nowhere"], "/nowhere: cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(serve, arguments, complaint):
    done = serve(start=False).salus(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["run", "submit", "ps", "logs", "wait", "cancel", "serve", "replay", "policy", "top", "doctor", "demo"]
)
def test_every_command_has_help_with_an_example(serve, command):
    done = serve(start=False).salus(command, "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_each_example_stands_in_a_line_of_its_own(serve, command):
    service = serve(start=False)
    service.environment["COLUMNS"] = "200"
    lines = [line.strip() for line in service.salus(command, "--help").stdout.splitlines()]
    assert [line.count("Example:") for line in lines if line.startswith("Example:")] == [1, 1]


def test_the_help_says_how_far_weights_reach(serve):
    words = " ".join(serve(start=False).salus("run", "--help").stdout.replace("│", " ").split())
    assert "Share of the device under the policy fair, 0.001 to 1000." in words


def test_a_job_is_called_by_its_script_even_where_that_has_several_lines(serve):
    service = serve()
    service.salus("run", "--", "sh", "-c", "true\ntrue train.py")
    assert "true true train" in service.jobs()


def test_the_shell_completes_commands_policies_and_jobs(serve):
    service = serve()
    service.job("--name", "a", iterations=1000, seconds=0.005)
    service.when("a", "running")

    def completed(*words: str) -> list[str]:
        service.environment |= {
            "_SALUS_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["salus", *words]),
            "COMP_CWORD": str(len(words)),
        }
        return service.salus().stdout.split()

    assert completed("po") == ["policy"]
    assert completed("policy", "f") == ["fair", "fifo"]
    assert completed("cancel", "") == ["1"]


def test_top_shows_who_runs_and_the_shares(serve):
    service = serve("--policy", "fair", "--capacity", "4GiB")
    for name in ("left", "right"):
        service.job("--name", name, "--ephemeral", "3GiB", iterations=100_000, seconds=0.005)
        service.when(name, "running", "ready")
    shown = service.salus("top", "--once", "--interval", "1s").stdout
    assert "policy fair, quantum 20 ms, 2 jobs, 0 waiting for memory" in shown
    assert "3 GiB of 4 GiB" in shown
    shares = {words[2]: words[6] for words in map(str.split, shown.splitlines()) if words[2:3] in (["left"], ["right"])}
    assert set(shares) == {"left", "right"}
    assert all(30 <= int(share.rstrip("%")) <= 70 for share in shares.values()), shown
    assert "runs in lane" in shown, "who waits says why"


def test_doctor_says_what_is_there_and_what_to_do(serve, tmp_path):
    service = serve(start=False)
    told = service.salus("doctor", "--json")
    found = {row["what"]: row for row in json.loads(told.stdout)}
    assert told.returncode == 0, told.stdout
    assert found["Python"]["verdict"] == found["system"]["verdict"] == "good"
    assert "none runs" in found["service"]["found"]
    assert all(row["advice"] for row in found.values() if row["verdict"] == "bad")
    assert "Python" in service.salus("doctor").stdout
    (tmp_path / "in-the-way").touch()
    service.environment["SALUS_STATE_DIR"] = str(tmp_path / "in-the-way" / "salus")
    told = service.salus("doctor", "--json")
    assert told.returncode == 1
    (state,) = (row for row in json.loads(told.stdout) if row["what"] == "state")
    assert (state["verdict"], state["advice"]) == ("bad", "set SALUS_STATE_DIR to a folder of yours")


def test_where_no_service_can_be_had_run_refuses_or_runs_unmanaged_as_it_was_told(serve):
    service = serve(start=False)
    service.environment["SALUS_STATE_DIR"] = "/proc/nowhere"
    refused = service.salus("run", "--", "echo", "hello")
    assert (refused.returncode, refused.stdout) == (2, "")
    ran = service.salus("run", "--if-no-service", "run", "--", "sh", "-c", "echo hello; exit 3")
    assert (ran.returncode, ran.stdout) == (3, "hello\n")
    assert ran.stderr.count("\n") == 1 and "runs unmanaged" in ran.stderr


def test_bench_switch_and_crowd_measure_and_write_what_they_measured(serve, tmp_path):
    service = serve(start=False)
    done = service.salus("bench", "switch", "--quick", "--out", str(tmp_path / "switch.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "switch.json").read_text())
    assert result["boundary"]["system_calls"] in ("none", None), "a boundary that nobody asks for makes no system call"
    assert result["hand_over"]["count"] > 100
    assert result["machine"]["cores"] >= 1
    done = service.salus("bench", "crowd", "--jobs", "20", "--seconds", "2", "--out", str(tmp_path / "crowd.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "crowd.json").read_text())
    assert result["jobs_finished"] == result["most_at_once"] == 20
    unknown = service.salus("bench", "switch", "--device", "moon")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)


def test_the_client_works_in_a_bare_interpreter():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import salus, salus.client.lease, salus.client.launch, salus.adaptors.iterations, salus.api\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('rich', 'typer', 'torch', 'numpy')]\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(SOURCE)], check=True)
