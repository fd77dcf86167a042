"""What of the memory adaptor can be tried without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from salus.adaptors.torch_memory import _AtEnd, live_blocks  # noqa: E402


def segment(address: int, *blocks: tuple[str, int]) -> dict:
    active = sum(size for state, size in blocks if state != "inactive")
    listed = [{"state": state, "size": size} for state, size in blocks]
    return {"address": address, "active_size": active, "blocks": listed}


def test_what_is_in_use_is_found_with_its_address():
    snapshot = [
        segment(1000, ("inactive", 100), ("active_allocated", 50), ("inactive", 10), ("active_allocated", 5)),
        segment(5000, ("inactive", 900)),
    ]
    assert live_blocks(snapshot) == ({1100: 50, 1160: 5}, False)


def test_a_block_that_waits_for_another_stream_is_in_use_and_said_so():
    assert live_blocks([segment(0, ("active_pending_free", 8))]) == ({0: 8}, True)


def gradients() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[int, int]]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    blocks = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    return model, optimizer, blocks


def test_gradients_that_the_script_dropped_are_dead_and_nothing_else_is():
    _, optimizer, blocks = gradients()
    at_end = _AtEnd({**blocks, 12345: 10}, [optimizer])
    assert sorted(at_end.still_alive()) == sorted({**blocks, 12345: 10}.items())
    optimizer.zero_grad()
    assert at_end.still_alive() == [(12345, 10)]


def test_a_gradient_that_somebody_else_still_has_is_alive():
    model, optimizer, blocks = gradients()
    at_end = _AtEnd(blocks, [optimizer])
    kept = model.weight.grad[1:]
    optimizer.zero_grad()
    (alive,) = at_end.still_alive()
    assert alive[0] == kept.untyped_storage().data_ptr()
