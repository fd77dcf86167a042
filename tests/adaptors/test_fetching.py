"""Memory that is on the host is fetched for a thread that wants to share it, without an iteration that counts."""

from __future__ import annotations

import threading

from salus.adaptors.iterations import Kind
from tests.adaptors.record import Watched


def test_between_iterations_the_job_gets_its_lease_for_a_moment_and_nothing_is_counted():
    process = Watched()
    process.iterations.fetch_memory()
    assert process.lease.story == ["begin", "end 0"] and process.iterations.kind is Kind.NONE


def test_within_an_iteration_there_is_nothing_to_fetch():
    process = Watched()
    process.iterations.mark_began()
    process.iterations.fetch_memory()
    assert process.lease.story == ["begin"]
    process.iterations.mark_ended()


def test_a_thread_that_waits_for_the_lease_fetches_it_for_all():
    """Who waited for it here could not be told from a thread that uses the device, and nothing would come."""
    process = Watched()
    waits, comes = threading.Event(), threading.Event()
    begin = process.lease.begin

    def slowly() -> None:
        waits.set()
        assert comes.wait(20)
        begin()

    process.lease.begin = slowly
    thread = threading.Thread(target=process.iterations.mark_began)
    thread.start()
    assert waits.wait(20)
    process.iterations.fetch_memory()
    assert process.lease.story == []
    comes.set()
    thread.join(20)
    assert process.lease.story == ["begin"]
