"""What of the memory adaptor can be tried without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from salus.adaptors.torch_memory import gpu_uuid, live_blocks  # noqa: E402


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


def test_a_gpu_is_known_by_its_uuid_however_torch_writes_it():
    class Properties:
        uuid = "1234-5678"

    assert gpu_uuid(Properties()) == "GPU-1234-5678"
    assert gpu_uuid(object()) is None
