"""Turns in C: they leave on the page what those in Python do, and all else to the hooks in Python."""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest

from salus.client.turns import counted_in_c, hooks_in_c, on_page
from salus.protocol.page import JobState, Page, Word


class Optimizer:
    def __init__(self, **state):
        self.state = state


@pytest.fixture
def page():
    page, descriptor = Page.create()
    os.close(descriptor)
    page.words[Word.STATE] = JobState.RUNNING_ON
    page.words[Word.BEGAN_NS] = time.monotonic_ns()
    return page


class Hooks:
    """The two in C, and what they left to those in Python."""

    def __init__(self, page, leader, *, keeps_state=False):
        self.left: list[tuple[str, object, object, object]] = []
        found = hooks_in_c(
            on_page(page.words, page.address()),
            leader,
            lambda *args: self.left.append(("before", *args)),
            lambda *args: self.left.append(("after", *args)),
            keeps_state=keeps_state,
        )
        assert found is not None
        self.before, self.after = found


def test_it_leaves_on_the_page_what_the_one_in_python_does(page):
    leader, words = Optimizer(), page.words
    hooks, turn = Hooks(page, leader), on_page(page.words, page.address())
    changed = []
    for end in (lambda: turn.end(1), lambda: hooks.after(leader, (leader,), {})):
        before, began = list(words), words[Word.BEGAN_NS]
        time.sleep(0.001)
        assert end() in (True, None)
        added = words[Word.BUSY_NS] - before[Word.BUSY_NS]
        assert added == words[Word.BEGAN_NS] - began >= 1_000_000
        changed.append({Word(i): words[i] - was for i, was in enumerate(before) if i in iter(Word) and words[i] != was})
    for found in changed:
        del found[Word.BUSY_NS], found[Word.BEGAN_NS]
    assert changed == [{Word.ITERATIONS: 1, Word.BOUNDARIES: 1}] * 2 and not hooks.left


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (Word.REVOKE, 1),
        (Word.STATE, JobState.ITERATING),
        (Word.STATE, JobState.BETWEEN),
        (Word.BEGAN_NS, 1),
    ],
)
def test_where_it_must_not_count_it_changes_nothing_and_calls_the_hook_in_python(page, word, value):
    leader = Optimizer()
    hooks = Hooks(page, leader)
    page.words[word] = value
    before, so_far = bytes(page.words), counted_in_c()
    assert hooks.after(leader, (leader,), {"closure": None}) is None
    assert bytes(page.words) == before and counted_in_c() == so_far
    assert hooks.left == [("after", leader, (leader,), {"closure": None})]


def test_a_step_of_another_optimizer_is_left_to_the_hook_in_python(page):
    leader, other = Optimizer(), Optimizer()
    hooks, so_far = Hooks(page, leader), counted_in_c()
    hooks.after(other, (), {})
    hooks.after(leader, (), {})
    assert hooks.left == [("after", other, (), {})] and counted_in_c() == so_far + 1


def test_before_a_step_only_one_that_has_lost_its_state_is_of_interest(page):
    class Odd:
        @property
        def state(self):
            raise RuntimeError("it cannot be looked at")

    full, empty, odd = Optimizer(step=1), Optimizer(), Odd()
    hooks = Hooks(page, full)
    assert [hooks.before(one, (), {}) for one in (full, empty, odd)] == [None] * 3 and not hooks.left
    hooks = Hooks(page, full, keeps_state=True)
    assert [hooks.before(one, (), {}) for one in (full, empty, odd)] == [None] * 3
    assert [one for _, one, *_ in hooks.left] == [empty, odd]


def test_what_the_hook_in_python_raises_is_raised(page):
    def raises(*_):
        raise ValueError("of the hook")

    # Kept: another may be where one that is gone was, and would be taken for it.
    leader = Optimizer()
    found = hooks_in_c(on_page(page.words, page.address()), leader, raises, raises, keeps_state=True)
    assert found is not None
    for hook in found:
        with pytest.raises(ValueError, match="of the hook"):
            hook(Optimizer(), (), {})


def test_an_optimizer_is_not_kept_alive(page):
    leader = Optimizer(step=1)
    hooks, alive = Hooks(page, leader, keeps_state=True), weakref.ref(leader)
    for _ in range(1000):
        hooks.before(leader, (), {})
        hooks.after(leader, (), {})
    del leader
    gc.collect()
    assert alive() is None


def test_without_a_page_or_a_library_there_are_none(page, monkeypatch, tmp_path):
    assert hooks_in_c(on_page(page.words, 0), Optimizer(), print, print, keeps_state=False) is None
    monkeypatch.setattr("salus.client.turns._library", None)
    monkeypatch.setattr("salus.client.turns.LIBRARY", tmp_path / "none.so")
    turn = on_page(page.words, page.address())
    assert hooks_in_c(turn, Optimizer(), print, print, keeps_state=False) is None and counted_in_c() == 0
