"""A job that lies: on its page, on its arena's channel, and in what it says after a restart. Others do not notice."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from salus.errors import SalusError
from salus.protocol import messages as msg
from salus.protocol import slots
from salus.protocol.page import JobState, Page, Word
from salus.protocol.slots import Kind, Record
from salus.service.report import MOST_BYTES, Report
from tests.service.harness import SOURCE, Service, eventually, finish
from tests.service.liar import LIES, WORDS, play

SERVICE_FOLDER = SOURCE / "salus" / "service"
LARGEST = 2**64 - 1
IMPATIENT = ("--quantum", "1ms", "--stuck-after", "1s")
"""A liar that keeps its lease is soon called stuck, and others go on without it."""


def start_liar(service: Service, *what: str) -> subprocess.Popen[str]:
    return service.in_background("tests.service.liar", str(service.socket), *what)


def nothing_is_left_of(service: Service, liar: subprocess.Popen[str]) -> None:
    liar.kill()
    liar.wait()
    eventually(lambda: service.status()["jobs"] == 0, "its jobs end with it")
    eventually(lambda: service.status()["lane_chunks"] == 0, "and nothing is kept for them")


@pytest.mark.parametrize("lie", LIES)
def test_whatever_a_word_of_a_page_says_others_compute_and_are_listed(serve, lie):
    service = serve(*IMPATIENT)
    liar = start_liar(service, str(lie))
    finish(service.job(iterations=20, seconds=0.001))
    assert liar.stdout.readline() == "told\n", liar.stderr.read()
    rows = service.jobs()
    assert {word.name for word in WORDS} < set(rows)
    assert all(0 <= row["iterations"] < 2**62 for row in rows.values())
    finish(service.job(iterations=5, seconds=0.001))
    nothing_is_left_of(service, liar)
    assert len(service.jobs()) == len(WORDS) + 1, "every one of them was written down"


@pytest.mark.parametrize("seed", [1, 2])
def test_random_pages_change_nothing_for_others(serve, seed):
    service = serve(*IMPATIENT)
    liar = start_liar(service, "random", str(seed))
    finish(service.job(iterations=50, seconds=0.001))
    assert liar.stdout.readline() == "told\n", liar.stderr.read()
    finish(service.job(iterations=5, seconds=0.001))
    nothing_is_left_of(service, liar)


def test_an_arena_that_never_stops_talking_holds_nobody_up(serve):
    service = serve(*IMPATIENT)
    liar = start_liar(service, "talks")
    assert liar.stdout.readline() == "began\n", liar.stderr.read()
    finish(service.job(iterations=30, seconds=0.001))
    nothing_is_left_of(service, liar)


def test_a_job_that_reports_no_time_is_charged_for_the_time_of_its_leases(serve):
    service = serve("--quantum", "5ms", "--stuck-after", "1s")
    liar = start_liar(service, "thrifty")
    assert liar.stdout.readline() == "began\n", liar.stderr.read()
    finish(service.job("--name", "honest", iterations=200, seconds=0.002))
    rows = service.jobs()
    assert 0.5 < rows["thrifty"]["gpu_time_s"] / rows["honest"]["gpu_time_s"] < 2.0, rows
    nothing_is_left_of(service, liar)


def test_a_job_that_passes_boundaries_and_keeps_its_lease_is_called_stuck_and_others_go_on(serve):
    service = serve(*IMPATIENT, "--policy", "priority")
    liar = start_liar(service, "keeper")
    assert liar.stdout.readline() == "began\n", liar.stderr.read()
    honest = service.job("--priority", "5", iterations=1500, seconds=0.001)
    assert service.when("keeper", "stuck")
    finish(honest)
    nothing_is_left_of(service, liar)


def test_an_arena_that_counts_packets_it_never_sent_is_cut_off(serve):
    service = serve()
    with closing(play(service.socket)) as liar:
        liar.page.words[Word.JOB_PACKETS] = 2**40
        liar.worker.send(msg.Yielded(wants_more=False))
        assert liar.is_cut_off()
    finish(service.job(iterations=3, seconds=0.001))


@pytest.mark.parametrize("slot", [1 << 19, 1 << 20, (1 << 32) - 1])
def test_an_arena_that_owns_what_no_device_has_is_cut_off(serve, slot):
    service = serve()
    with closing(play(service.socket)) as liar:
        liar.channel.send(slots.pack([Record(Kind.OWN, slot)]))
        assert liar.is_cut_off()


def raw(service: Service) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(service.socket))
    sock.send(msg.encode(msg.Hello(msg.VERSION, "x")))
    sock.recv(1 << 16)
    return sock


def test_texts_with_halves_of_letters_and_endless_texts_reach_no_file(serve):
    service = serve()
    register = {"type": "register", "name": "half \ud800", "command": ["caf\udce9"], "directory": "/\udcff"}
    with raw(service) as sock:
        sock.send(json.dumps(register).encode())
        assert b"registered" in sock.recv(1 << 16)
        assert service.jobs()["half \\ud800"]["command"] == "caf\\udce9"
    with raw(service) as sock:
        sock.send(json.dumps({**register, "log": "/" + "x" * 10_000}).encode())
        assert b"more than 4096 letters" in sock.recv(1 << 16)
    eventually(lambda: service.status()["jobs"] == 0, "it ended with its launcher")
    assert {row["state"] for row in service.jobs().values()} == {"failed"}
    finish(service.job(iterations=3, seconds=0.001))


@pytest.mark.parametrize("lane", [-5, 0, 7, 2**63 - 1])
def test_after_a_restart_nobody_gets_into_a_lane_that_was_not_theirs(serve, lane):
    service = serve("--capacity", "520MiB")
    with closing(play(service.socket)) as liar:
        theirs = int(service.jobs()["liar"]["lane"])
        liar.page.words[Word.LANE] = 99
        service.kill()
        service.start()
        with service.connect() as launcher, service.connect() as worker:
            launcher.request(msg.Rejoin(liar.job_id, liar.token))
            again = msg.Reattach(liar.job_id, liar.token, True, True, False, lane, 1 << 20, 4 << 20, 0)
            with pytest.raises(SalusError, match="was not in lane"):
                worker.request(again)
            worker.send(msg.Reattach(liar.job_id, liar.token, True, True, False, theirs, 1 << 20, 4 << 20, 0))
            answer, descriptors = worker.receive()
            assert answer == msg.Attached(liar.job_id)
            for descriptor in descriptors:
                os.close(descriptor)
            assert service.jobs()["liar"]["lane"] == theirs


# The report itself.


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def told() -> Iterator[tuple[Page, Report, list[str], Clock]]:
    refused: list[str] = []
    clock = Clock()
    page, descriptor = Page.create()
    yield page, Report(page, refused.append, clock_ns=clock), refused, clock
    page.close()
    os.close(descriptor)


def test_no_job_used_the_device_for_longer_than_it_was_there(told):
    page, report, refused, clock = told
    clock.now_ns += 5 * 10**9
    page.words[Word.BUSY_NS] = 4 * 10**9
    assert report.used() == (0, 4 * 10**9) and not refused
    page.words[Word.BUSY_NS] = LARGEST
    assert report.used() == (0, 5 * 10**9)
    assert len(refused) == 1, "said once"
    page.words[Word.ITERATIONS] = 2**63
    assert report.used()[0] == 0 and len(refused) == 1


def test_what_a_job_brought_along_counts(told):
    page, _, refused, clock = told
    report = Report(page, refused.append, iterations=100, used_ns=10**12, clock_ns=clock)
    page.words[Word.BUSY_NS], page.words[Word.ITERATIONS] = 10**12, 100
    assert report.used() == (100, 10**12) and not refused


def test_memory_that_no_machine_has_is_none(told):
    page, report, refused, _ = told
    page.words[Word.PRIVATE_BYTES] = MOST_BYTES
    assert report.bytes_in(Word.PRIVATE_BYTES) == MOST_BYTES and not refused
    page.words[Word.PRIVATE_BYTES] = MOST_BYTES + 1
    assert report.bytes_in(Word.PRIVATE_BYTES) == 0 and refused


def test_a_state_that_is_none_counts_as_being_at_work(told):
    page, report, refused, _ = told
    page.words[Word.STATE] = 77
    assert report.state is JobState.ITERATING and refused


def test_only_the_report_reads_what_is_on_a_page():
    """Everybody else in the service writes to it and asks the report."""
    for file in SERVICE_FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and file.name != "report.py":
                owner = ast.unparse(node.value)
                assert not owner.endswith("words"), f"{file.name}:{node.lineno} reads {ast.unparse(node)}"
