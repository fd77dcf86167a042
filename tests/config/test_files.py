"""A settings file is edited without harm to anything else in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from salus.config.file import as_text, parse_keys, read_entries, remove_value, set_value
from salus.errors import RequestRejected

COMMENTED = """\
# The lab's settings.
[service]
policy = "fair"   # since March, ask Ann
quantum = "20ms"

# Who may do what.
[limits.users.alice]
weight = 2
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "salus" / "config.toml"


def test_a_file_that_is_not_there_is_made_with_its_folder(file):
    set_value(file, ("service", "policy"), '"rr"')
    assert file.read_text() == '[service]\npolicy = "rr"\n'


def test_only_the_value_changes_and_the_comment_behind_it_stays(file):
    file.parent.mkdir()
    file.write_text(COMMENTED)
    set_value(file, ("service", "policy"), '"srtf:fill=off"')
    assert file.read_text() == COMMENTED.replace('"fair"  ', '"srtf:fill=off"  ')


def test_a_new_key_goes_to_the_end_of_its_table_and_a_new_table_to_the_end_of_the_file(file):
    file.parent.mkdir()
    file.write_text(COMMENTED)
    set_value(file, ("service", "scrub"), "true")
    set_value(file, ("limits", "users", "a.b", "jobs"), "3")
    expected = COMMENTED.replace('quantum = "20ms"\n', 'quantum = "20ms"\nscrub = true\n')
    assert file.read_text() == expected + '\n[limits.users."a.b"]\njobs = 3\n'
    assert [as_text(entry.keys) for entry in read_entries(file)][-1] == 'limits.users."a.b".jobs'


def test_a_value_that_is_taken_out_leaves_the_rest(file):
    file.parent.mkdir()
    file.write_text(COMMENTED)
    assert remove_value(file, ("service", "quantum"))
    assert file.read_text() == COMMENTED.replace('quantum = "20ms"\n', "")
    assert not remove_value(file, ("service", "quantum"))


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ('policy="a#b" # c', 'policy= "x" # c'),
        ("policy = 'a' #", 'policy = "x" #'),
        ('"policy" = "a=b"', '"policy" = "x"'),
        ('  policy = "a"', '  policy = "x"'),
    ],
)
def test_signs_of_toml_inside_a_value_are_part_of_it(file, line, changed):
    file.parent.mkdir()
    file.write_text(f"[service]\n{line}\n")
    set_value(file, ("service", "policy"), '"x"')
    assert file.read_text() == f"[service]\n{changed}\n"


@pytest.mark.parametrize(
    "text",
    [
        'service = { policy = "a", quantum = "1s" }\n',
        'service.quantum = "1s"\n',
        '[service]\npolicy = """\na\n"""\n',
        'service = "nonsense"\n',
    ],
)
def test_what_cannot_be_changed_safely_is_left_alone(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(RequestRejected, match="edit"):
        set_value(file, ("service", "policy"), '"x"')
    assert file.read_text() == text and os.listdir(file.parent) == ["config.toml"]


def test_a_file_with_a_mistake_is_not_edited_but_an_unknown_setting_can_be_taken_out(file):
    file.parent.mkdir()
    file.write_text("[service]\nnonsense = 1\n")
    assert remove_value(file, ("service", "nonsense"))
    assert file.read_text() == "[service]\n"
    file.write_text("[service\n")
    with pytest.raises(RequestRejected, match=r"config\.toml:1: this is not TOML"):
        set_value(file, ("service", "policy"), '"x"')


def test_a_link_stays_a_link_and_the_mode_of_the_file_stays(file, tmp_path):
    dotfiles = tmp_path / "dotfiles.toml"
    dotfiles.write_text(COMMENTED)
    dotfiles.chmod(0o600)
    file.parent.mkdir()
    file.symlink_to(dotfiles)
    set_value(file, ("service", "scrub"), "true")
    assert file.is_symlink() and "scrub = true" in dotfiles.read_text() and dotfiles.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_is_one_clear_line():
    with pytest.raises(RequestRejected, match=r"^/proc/salus/config.toml: the settings cannot be written \("):
        set_value(Path("/proc/salus/config.toml"), ("service", "policy"), '"x"')


def test_the_name_of_a_setting_is_read_as_toml_reads_it():
    assert parse_keys('limits.users."a.b".jobs') == ("limits", "users", "a.b", "jobs")
    for wrong in ("", "a..b", "a b", "a = 1\nb"):
        with pytest.raises(RequestRejected, match="is no name of a setting"):
            parse_keys(wrong)
