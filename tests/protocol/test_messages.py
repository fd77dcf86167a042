"""The wire: what goes through it comes out the same, and what is wrong is told apart."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.errors import InvariantBroken, RequestRejected, SalusError, ServiceUnavailable
from salus.protocol import messages as msg
from salus.protocol.errors import NoSuchJob, VersionMismatch, to_error, to_message, version_mismatch
from salus.protocol.page import MAGIC, PAUSE_NS, JobState, Page, Word

SAMPLES = [
    msg.Hello(1, "0.1"),
    msg.Register("a", ["python", "x.py"], "/", weight=2, iterations=7, duration_s=1.5, persistent_bytes=0),
    msg.Attach("1", "secret"),
    msg.Rejoin("1", "secret"),
    msg.Reattach("1", "secret", True, False, True, 3, 1 << 30, 1 << 20, 0),
    msg.Ready(),
    msg.Yielding(True),
    msg.Yielded(True),
    msg.Recalled(7),
    msg.Finished(-9),
    msg.ListJobs(True),
    msg.GetStatus(),
    msg.GetUsage(["user", "day"], "2026-11-01"),
    msg.CancelJob("1"),
    msg.SetJob("7", "name", 2.0, -1),
    msg.PauseJob("7"),
    msg.ResumeJob("7"),
    msg.AwaitJob("1"),
    msg.SetPolicy("fair:by=memory"),
    msg.Stop(),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    assert msg.decode(msg.encode(message), msg.FROM_CLIENT) == message


def test_every_message_of_a_client_has_a_sample():
    assert {type(message) for message in SAMPLES} == set(msg.FROM_CLIENT)


@pytest.mark.parametrize(
    ("packet", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 60000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "unknown type None"),
        (b'{"type":"explode"}', "unknown type 'explode'"),
        (b'{"type":["ready"]}', "unknown type"),
        (b'{"type":"welcome","version":1,"salus":"x","pid":1}', "unknown type 'welcome'"),
        (b'{"type":"hello","version":1}', "hello: field salus is missing"),
        (b'{"type":"hello","version":"1","salus":"x"}', "hello: field version is of the wrong type"),
        (b'{"type":"hello","version":true,"salus":"x"}', "hello: field version is of the wrong type"),
        (b'{"type":"ready","uid":0}', "ready: unknown field 'uid'"),
        (b'{"type":"register","name":"a","command":["x",1],"directory":"/"}', "field command is of the wrong type"),
        (b'{"type":"register","name":"a","command":"x","directory":"/"}', "field command is of the wrong type"),
        (b'{"type":"register","name":"a","command":["x"],"directory":"/","weight":NaN}', "weight is out of range"),
        (b'{"type":"register","name":"a","command":["x"],"directory":"/","weight":1e999}', "weight is out of range"),
        (b'{"type":"register","name":"a","command":["x"],"directory":"/","duration_s":-Infinity}', "is out of range"),
        (b"x" * (msg.MAX_PACKET_BYTES + 1), "over 65536 bytes"),
    ],
)
def test_what_is_wrong_is_told(packet, complaint):
    with pytest.raises(msg.ProtocolError) as caught:
        msg.decode(packet, msg.FROM_CLIENT)
    assert complaint in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(
            lambda value: json.dumps(value).encode()
        ),
        st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8)).map(
            lambda value: json.dumps({"type": "register", **value}).encode()
        ),
    )
)
def test_nothing_that_arrives_raises_anything_else(packet):
    with contextlib.suppress(msg.ProtocolError):
        msg.decode(packet, msg.FROM_CLIENT)


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(msg.ProtocolError, match="over the limit"):
        msg.encode(msg.SetPolicy("x" * msg.MAX_PACKET_BYTES))


@pytest.mark.parametrize(
    "error", [SalusError, RequestRejected, ServiceUnavailable, InvariantBroken, VersionMismatch, NoSuchJob]
)
def test_an_error_becomes_the_same_class_again_on_the_other_side(error):
    arrived = to_error(to_message(error("why")))
    assert type(arrived) is error
    assert str(arrived) == "why"


def test_an_error_of_a_newer_service_is_still_an_error_of_ours():
    assert type(to_error(msg.Failed("brand-new", "why"))) is SalusError


def test_different_versions_say_so_plainly():
    assert str(version_mismatch(7, "2.0", "0.1")) == (
        f"this is Salus 2.0 (protocol 7) and the service is Salus 0.1 (protocol {msg.VERSION}); "
        "install the same version on both sides, or restart the service: salus serve"
    )


def test_the_page_is_seen_from_both_sides():
    ours, descriptor = Page.create()
    theirs = Page(descriptor)
    os.close(descriptor)
    assert theirs.words[Word.MAGIC] == MAGIC
    theirs.words[Word.BUSY_NS] = 5
    theirs.words[Word.ITERATIONS] = 2
    theirs.words[Word.BEGAN_NS] = 100
    assert ours.used(now_ns=130) == (2, 35)
    theirs.words[Word.STATE] = JobState.ITERATING
    theirs.words[Word.WAITING_FOR_MEMORY] = 110
    assert ours.used(now_ns=130) == (2, 15), "not while it waits for memory"
    theirs.words[Word.BEGAN_NS] = 115
    assert ours.used(now_ns=130) == (2, 5), "too little for a moment, never too much"
    theirs.words[Word.WAITING_FOR_MEMORY] = 0
    assert ours.used(now_ns=130) == (2, 20)
    theirs.words[Word.BEGAN_NS] = 100
    theirs.words[Word.STATE] = JobState.BETWEEN
    assert ours.used(now_ns=130) == (2, 35)
    assert ours.used(now_ns=PAUSE_NS * 3) == (2, PAUSE_NS + 5)
    theirs.words[Word.BEGAN_NS] = 0
    assert ours.used(now_ns=130) == (2, 5)
    ours.close()
    theirs.close()
