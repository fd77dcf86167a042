"""`salus run`, `submit` and the commands around them, as a person at a terminal meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

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


def test_run_starts_a_service_by_itself_and_that_one_ends_after_its_last_job(serve):
    service = serve(start=False)
    done = service.salus("run", "--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    eventually(lambda: not service.socket.exists(), "the service ended")


def test_a_command_that_is_not_there_is_one_clear_line(serve):
    done = serve().salus("run", "--", "no-such-command")
    assert done.returncode == 2
    assert done.stderr == "salus: no-such-command: cannot be run (No such file or directory)\n"


def test_while_a_job_waits_for_memory_its_launcher_says_why_and_where_in_the_queue(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    service.job("--name", "first", "--persistent", "3GiB", iterations=400, seconds=0.005)
    service.when("first", "running")
    second = service.job("--name", "second", "--persistent", "3GiB", iterations=2, seconds=0.001)
    waiting = service.when("second", "waiting")
    assert waiting["position"] == 1
    output, errors = second.communicate(timeout=60)
    assert "finished" in output
    assert "waits for memory, 1 of 1 in the queue: needs 3 GiB and a lane of 0 B; 1 GiB of 4 GiB are free" in errors


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


@pytest.mark.parametrize("command", ["run", "submit", "ps", "logs", "wait", "cancel", "serve", "replay", "policy"])
def test_every_command_has_help_with_an_example(serve, command):
    done = serve(start=False).salus(command, "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout


def test_the_client_works_in_a_bare_interpreter():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import salus, salus.client.lease, salus.client.launch, salus.adaptors.iterations, salus.api\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('rich', 'typer', 'torch', 'numpy')]\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(SOURCE)], check=True)
