"""`salus config` and `salus policy`, as a person at a terminal meets them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from salus.cli.main import app
from salus.config.schema import CAPS, SETTINGS
from salus.config.variables import VARIABLES
from tests.service.harness import SOURCE, eventually

DOCS = SOURCE.parent / "docs" / "configuration.md"


def settings_of(service, *options: str) -> dict[str, dict]:
    done = service.salus("config", "--json", *options)
    assert done.returncode == 0, done.stderr
    return {one["key"]: one for one in json.loads(done.stdout)["settings"]}


def test_a_policy_is_remembered_by_the_next_service_that_a_job_starts(serve):
    service = serve(start=False)
    job = service.salus_in_background("run", "--", "sleep", "600")
    eventually(lambda: service.socket.exists() and "fair" in service.salus("policy").stdout, "a service runs")
    done = service.salus("policy", "srtf")
    assert done.returncode == 0 and done.stdout.startswith("the policy is srtf now; the next service has srtf too")
    job.terminate()
    job.communicate()
    eventually(lambda: not service.socket.exists(), "the service has ended with its job")
    job = service.salus_in_background("run", "--", "sleep", "600")
    eventually(lambda: service.socket.exists(), "another service runs")
    assert eventually(service.status, "it answers")["policy"] == "srtf"


def test_a_policy_for_once_is_forgotten_with_the_service(serve):
    service = serve()
    assert service.salus("policy", "--once", "rr").stdout == "the policy is rr now\n"
    assert service.status()["policy"] == "rr" and settings_of(service)["service.policy"]["from"] == "default"


def test_a_policy_can_be_chosen_before_any_service_runs(serve):
    service = serve(start=False)
    done = service.salus("policy", "las")
    assert done.returncode == 0 and done.stdout.startswith("no service runs now; the next service has las too, by ")
    assert service.salus("policy").stdout.splitlines()[-1].startswith("no service runs; the next one has las (")
    assert service.salus("policy", "best").returncode == 2
    assert service.salus("policy", "las", "--once").returncode == 2, "there is none to change"


def test_a_policy_that_a_variable_overrules_says_so(serve):
    service = serve(start=False)
    service.environment["SALUS_SERVICE_POLICY"] = "fifo"
    assert service.salus("policy", "las").stdout.endswith("; but SALUS_SERVICE_POLICY is set, and wins\n")


def test_a_policy_that_cannot_be_written_down_changes_the_service_and_says_what_is_missing(serve):
    service = serve()
    Path(service.environment["SALUS_CONFIG"]).write_text("[service\n")
    done = service.salus("policy", "rr")
    assert done.returncode == 2 and done.stderr.startswith(
        "salus: the policy is rr now; but the next service will not have it: "
    )
    assert service.status()["policy"] == "rr"


def test_a_service_takes_its_settings_from_the_file_and_options_win(serve):
    service = serve(start=False)
    Path(service.environment["SALUS_CONFIG"]).write_text(
        '[service]\npolicy = "rr"\njournal = false\ncapacity = "3GiB"\ndevice = "host"\n'
    )
    service.start()
    status = service.status()
    assert (status["policy"], status["capacity_bytes"]) == ("rr", 3 << 30) and not service.journals()
    assert service.salus("config").stdout.count(service.environment["SALUS_CONFIG"]) >= 4


def test_every_setting_is_shown_with_its_value_and_where_that_comes_from(serve):
    service = serve(start=False)
    service.environment["SALUS_SERVICE_QUANTUM"] = "1s"
    assert service.salus("config", "set", "service.reserve", "1GiB").returncode == 0
    assert service.salus("config", "set", "--system", "service.policy", "rr").returncode == 0
    found = settings_of(service)
    assert list(found) == [setting.key for setting in SETTINGS]
    file, machine = service.environment["SALUS_CONFIG"], f"{service.environment['SALUS_SYSTEM_CONFIG_DIR']}/config.toml"
    places = {key: (one["value"], one["from"], one["name"], one["line"]) for key, one in found.items()}
    assert places["service.reserve"] == ("1GiB", "user", file, 2)
    assert places["service.policy"] == ("rr", "machine", machine, 2)
    assert places["service.quantum"] == ("1s", "environment", "SALUS_SERVICE_QUANTUM", None)
    assert places["service.gpu"] == (None, "default", None, None)
    shown = service.salus("config").stdout
    assert re.search(r"service\.reserve +1GiB +\S*config\.toml:2", shown), shown
    assert re.search(r"service\.gpu +\(all\) +default", shown)
    assert "SALUS_STATE_DIR" in shown
    machine_wide = settings_of(service, "--system")
    assert machine_wide["service.users"]["value"] == "all" and machine_wide["service.reserve"]["value"] == "256MiB"
    assert machine_wide["service.quantum"]["from"] == "default", "a terminal's variables are not the service's"


def test_settings_are_set_and_taken_out_by_name(serve):
    service = serve(start=False)
    file = Path(service.environment["SALUS_CONFIG"])
    assert service.salus("config", "path").stdout == f"{file}\n"
    done = service.salus("config", "set", "limits.users.alice.jobs", "3")
    assert done.stdout == f"limits.users.alice.jobs = 3, in {file}\n" and file.read_text().endswith("jobs = 3\n")
    assert settings_of(service)["limits.users.alice.jobs"]["value"] == "3"
    assert service.salus("config", "unset", "limits.users.alice.jobs").returncode == 0
    again = service.salus("config", "unset", "limits.users.alice.jobs")
    assert again.returncode == 2 and "is not set there" in again.stderr
    for wrong, complaint in (
        (("service.polcy", "fair"), "there is no setting service.polcy; did you mean service.policy?"),
        (("service.quantum", "20"), "service.quantum: '20' has no unit; write 20ms or 20s"),
        (("a..b", "1"), "is no name of a setting"),
    ):
        done = service.salus("config", "set", *wrong)
        assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1
    file.write_text("[service]\nnonsense = 1\n")
    assert f"{file}:2: there is no setting service.nonsense" in service.salus("config").stderr
    assert service.salus("config", "unset", "service.nonsense").returncode == 0
    assert service.salus("config").returncode == 0


def test_a_job_that_starts_a_service_with_a_mistake_in_the_settings_says_where_it_is(serve):
    service = serve(start=False)
    file = Path(service.environment["SALUS_CONFIG"])
    file.write_text("\n[service]\nquantum = 20\n")
    for command in (("run", "--", "true"), ("submit", "--", "true"), ("serve",)):
        done = service.salus(*command)
        assert done.returncode == 2 and f"{file}:3: service.quantum: '20' has no unit" in done.stderr
        assert done.stderr.count("\n") == 1


def test_what_to_do_without_a_service_can_be_set(serve):
    service = serve(start=False)
    service.environment["SALUS_STATE_DIR"] = "/proc/nowhere"
    hello = ("run", "--", sys.executable, "-c", "print('hello')")
    assert service.salus(*hello).returncode == 2
    service.salus("config", "set", "run.if-no-service", "run")
    done = service.salus(*hello)
    assert (done.returncode, done.stdout) == (0, "hello\n") and "runs unmanaged" in done.stderr
    assert service.salus("run", "--if-no-service", "refuse", "--", "true").returncode == 2


def test_every_option_of_serve_has_a_key_in_the_settings():
    import typer.main

    serve = typer.main.get_command(app).commands["serve"]
    options = {max(one.opts, key=len).removeprefix("--") for one in serve.params} - {"help", "system"}
    assert options == {setting.keys[1] for setting in SETTINGS if setting.keys[0] in ("service", "storage")}


def test_every_variable_in_the_source_is_known():
    names = {name for file in SOURCE.rglob("*.py") for name in re.findall(r"SALUS_[A-Z][A-Z_]*[A-Z]", file.read_text())}
    known = {one.name for one in VARIABLES} | {setting.variable for setting in SETTINGS}
    assert names <= known | {"SALUS_SYSTEM"}, names - known
    assert {one.name for one in VARIABLES} <= names


def test_the_page_on_configuration_lists_every_setting_and_every_variable_as_they_are():
    text = DOCS.read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE))
    expected = {
        setting.key: f"{f'`{setting.default}`' if setting.default else setting.if_unset or 'nobody'}"
        f"{f' (machine-wide: `{setting.machine_default}`)' if setting.machine_default else ''}"
        f" | {setting.kind.expected} | {setting.help}"
        for setting in SETTINGS
    }
    expected |= {cap.key: f"{cap.kind.expected} | {cap.help}" for cap in CAPS}
    expected |= {one.name: one.help for one in VARIABLES}
    assert rows == expected
    too_long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not too_long, "only rows of a table are longer than a line"


def test_doctor_names_the_line_of_a_setting_with_which_no_job_can_run(serve):
    service = serve(start=False)
    Path(service.environment["SALUS_CONFIG"]).write_text('[service]\npolcy = "fifo"\n')
    done = service.salus("doctor")
    assert done.returncode == 1
    assert "config.toml:2: there is no setting service.polcy" in " ".join(done.stdout.split()), done.stdout
