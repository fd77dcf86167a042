"""Which settings there are, what they accept, and which of several places has the last word."""

from __future__ import annotations

import pytest

from salus.config import schema
from salus.config.load import Origin, load
from salus.config.schema import POLICY, QUANTUM, SCRUB, USERS, Caps
from salus.errors import RequestRejected


def test_without_any_file_every_setting_has_its_default(files):
    settings = load()
    assert settings[POLICY] == "fair" and settings[QUANTUM] == 0.02 and settings[SCRUB] is False
    assert settings.get(schema.CAPACITY) is None
    assert {found.source.origin for found in settings.all()} == {Origin.DEFAULT}


def test_a_later_place_wins(files, monkeypatch):
    files.machine.write_text('[service]\npolicy = "fifo"\n')
    assert load()[POLICY] == "fifo"
    files.user.write_text('# mine\n[service]\npolicy = "srtf"\n')
    assert load()[POLICY] == "srtf" and str(load().source(POLICY)) == f"{files.user}:3"
    monkeypatch.setenv("SALUS_SERVICE_POLICY", "rr")
    assert load()[POLICY] == "rr" and str(load().source(POLICY)) == "SALUS_SERVICE_POLICY"
    settings = load(options={POLICY: "las", QUANTUM: None})
    assert settings[POLICY] == "las" and str(settings.source(POLICY)) == "--policy" and settings[QUANTUM] == 0.02


def test_no_user_can_override_what_the_administrator_has_set_for_the_machine_wide_service(files):
    files.machine.write_text('[service]\npolicy = "fifo"\n[limits]\nweight = 2\n')
    files.user.write_text('[service]\npolicy = "rr"\nusers = "bob"\n[limits.users.alice]\nweight = 1000\n')
    machine_wide = load(machine_wide=True)
    assert machine_wide[POLICY] == "fifo" and machine_wide[USERS] == ("all",)
    assert machine_wide.limits.of("alice") == Caps(weight=2.0)


def test_who_may_use_the_machine_wide_service_and_its_limits_say_nothing_about_a_users_own(files):
    files.machine.write_text('[service]\nusers = "all"\nvisible = true\n[limits]\njobs = 3\n')
    own = load()
    assert own[USERS] == () and own[schema.VISIBLE] is False and own.limits.of("alice") == Caps()


def test_limits_are_resolved_cap_by_cap_from_the_user_the_groups_and_everybody(files):
    files.machine.write_text(
        '[limits]\nweight = 1\njobs = 4\nmemory = "1GiB"\n'
        "[limits.groups.students]\njobs = 2\nweight = 0.5\n[limits.groups.staff]\njobs = 8\n"
        '[limits.users.alice]\nweight = 10\n[limits.users."a.b"]\npriority = -1\n'
    )
    limits = load(machine_wide=True).limits
    assert limits.of("carol") == Caps(weight=1, jobs=4, memory=1 << 30)
    assert limits.of("bob", ["students", "staff"]) == Caps(weight=0.5, jobs=8, memory=1 << 30)
    assert limits.of("alice", ["students"]) == Caps(weight=10, jobs=2, memory=1 << 30)
    assert limits.of("a.b").priority == -1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[service]\npolcy = "fair"\n', "2: there is no setting service.polcy; did you mean service.policy?"),
        (
            "[service]\nstuck_after = 9\n",
            "2: there is no setting service.stuck_after; did you mean service.stuck-after",
        ),
        ('policy = "fair"\n', "1: there is no setting policy; did you mean service.policy?"),
        ("\n\n[nonsense]\nx = 1\n", "4: there is no setting nonsense.x; salus config lists those there are"),
        ("[limits.users.alice]\nwieght = 1\n", "did you mean limits.users.alice.weight?"),
        ("[service]\nquantum = 20\n", "2: service.quantum: '20' has no unit; write 20ms or 20s"),
        ('[service]\nmps = "maybe"\n', "2: service.mps: 'maybe' is not understood; expected off, auto or on"),
        ('[service]\nscrub = "yes"\n', "2: service.scrub: 'yes' is not understood; expected true or false"),
        ('[service]\nreserve = ["a", 1.5]\n', "2: service.reserve: ['a', 1.5] is not understood; expected a size"),
        ('[service]\npolicy = "best"\n', "2: service.policy: there is no policy 'best'; there are: fair, fifo"),
        ("[limits]\njobs = -1\n", "2: limits.jobs: '-1' is not understood; expected a whole number from 0"),
        ("[service]\nx = \n", "2: this is not TOML: Invalid value; write settings like key = value"),
        ("[service\n", "1: this is not TOML"),
        ('[service]\npolicy = "fair"\npolicy = "rr"\n', "3: this is not TOML: Cannot overwrite a value"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_file_line_key_and_what_is_expected(files, text, complaint):
    files.user.write_text(text)
    with pytest.raises(RequestRejected) as caught:
        load()
    message = str(caught.value)
    assert message.startswith(f"{files.user}:") and complaint in message and "\n" not in message


def test_a_bad_value_elsewhere_is_named_by_the_variable_or_the_option(files, monkeypatch):
    with pytest.raises(RequestRejected, match=r"^--quantum: 'soon' is not a time"):
        load(options={QUANTUM: "soon"})
    monkeypatch.setenv("SALUS_SERVICE_QUANTUM", "soon")
    with pytest.raises(RequestRejected, match=r"^SALUS_SERVICE_QUANTUM: 'soon' is not a time"):
        load()


def test_a_value_may_span_lines_and_a_list_is_as_good_as_text(files):
    files.user.write_text('[service]\nusers = [\n  "alice", # first\n  "@lab",\n]\nscrub = true\n')
    settings = load()
    assert settings[USERS] == ("alice", "@lab") and settings[SCRUB] is True
    assert str(settings.source(SCRUB)) == f"{files.user}:6"


def test_every_default_is_a_value_that_its_setting_accepts_and_no_two_share_a_variable():
    for setting in schema.SETTINGS:
        for default in (setting.default, setting.machine_default):
            if default is not None:
                setting.kind.parse(default)
        assert setting.default is not None or setting.if_unset, setting.key
        assert setting.help.endswith(".")
    assert len({setting.variable for setting in schema.SETTINGS}) == len(schema.SETTINGS)
