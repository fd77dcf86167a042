"""Descriptors of ours under numbers that a script may have given to files of its own."""

from __future__ import annotations

import os
import resource

import pytest

from salus.protocol.descriptors import FROM_NUMBER, Descriptor, Event, out_of_the_way


@pytest.fixture
def event():
    made = Event(out_of_the_way(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)))
    yield made
    made.close()


def replaced(event: Event, path) -> int:
    """A script closes the event and gets its number for a file of its own."""
    with path.open("wb+") as file:
        file.write(b"theirs, and longer than eight bytes")
        file.seek(0)
        os.dup2(file.fileno(), event.number)
    return event.number


def test_a_descriptor_is_moved_where_the_next_files_of_a_script_do_not_come():
    reader, writer = os.pipe()
    moved = out_of_the_way(writer)
    assert moved >= FROM_NUMBER and not os.get_inheritable(moved)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(writer)
    os.write(moved, b"x")
    assert os.read(reader, 1) == b"x"
    assert out_of_the_way(moved) == moved
    for number in (reader, moved):
        os.close(number)


def test_where_few_descriptors_are_allowed_the_number_is_lower():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader, writer = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        moved = out_of_the_way(writer)
        assert 150 <= moved < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for number in (reader, moved):
        os.close(number)


def test_an_event_rings_and_is_hushed(event):
    event.ring()
    assert os.eventfd_read(event.number) == 1
    event.ring()
    event.hush()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event.number)
    event.hush()


def test_a_file_of_the_script_under_the_number_of_an_event_is_left_alone(event, tmp_path):
    number = replaced(event, tmp_path / "theirs")
    assert not event.is_ours
    event.ring()
    event.hush()
    event.close()
    assert os.lseek(number, 0, os.SEEK_CUR) == 0, "nothing was read"
    assert (tmp_path / "theirs").read_bytes() == b"theirs, and longer than eight bytes"
    os.close(number)


def test_what_is_closed_is_no_error_and_not_ours():
    reader, writer = os.pipe()
    ours = Descriptor(writer)
    os.close(writer)
    assert not ours.is_ours
    ours.close()
    os.close(reader)
