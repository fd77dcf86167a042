"""Tensors of the arena that a script sends to its other processes, as `torch.multiprocessing` does.

Torch asks the driver for a handle of the memory, and there is none for memory that is mapped chunk by chunk. So a
storage that lies in the arena is sent as a `Region` instead (client/lending.py), in the same places of the same
message: torch's own code pickles it, and builds the tensor on the other side. What lies elsewhere is sent as without
Salus: the memory of graphs, and all that a process sends whose memory Salus does not manage.

Nothing takes this out again: a tensor that was sent may arrive at any time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from salus.client import lending
from salus.client.lending import Lender, Region
from salus.client.say import say
from salus.errors import SalusError

_torch: Any = torch
NOT_SENT_ON = (
    "Attempted to send CUDA tensor received from another process; this is not currently supported. "
    "Consider cloning before sending."
)
"""As torch says it."""

_lender: Callable[[], Lender | None] = lambda: None  # noqa: E731
_bring_back: Callable[[], None] = lambda: None  # noqa: E731


class Sent(Region):
    """A region that sees to it, where it arrives, that torch knows what to do with it."""

    def __reduce__(self) -> Any:
        return _received, super().__reduce__()[1]


def _received(*arguments: Any) -> Sent:
    install()
    return Sent(*arguments)


def lend_from(lender: Callable[[], Lender | None], bring_back: Callable[[], None]) -> None:
    """From now on storages of this lender's arena can be sent. `bring_back`: it is on the host, and is wanted here."""
    global _lender, _bring_back
    _lender, _bring_back = lender, bring_back


@functools.cache
def install() -> None:
    """In a process that sends tensors, or receives them. Once."""
    storage = _torch.UntypedStorage
    share, receive, release = storage._share_cuda_, storage._new_shared_cuda, storage._release_ipc_counter_cuda

    @functools.wraps(share)
    def _share_cuda_(self: Any, *args: Any, **kwargs: Any) -> Any:
        lent = _lend(self)
        if lent is None:
            return share(self, *args, **kwargs)
        region, offset, loan = lent
        _wait_for_stream(self.device)
        return self.device.index or 0, region, self.nbytes(), offset, region, loan, b"", False

    @functools.wraps(receive)
    def _new_shared_cuda(device: int, handle: Any, size_bytes: int, offset: int, *rest: Any) -> Any:
        if not isinstance(handle, Region):
            return receive(device, handle, size_bytes, offset, *rest)
        try:
            tensor = _torch.utils.dlpack.from_dlpack(handle.borrow(device, offset, size_bytes, rest[1]))
        except SalusError as error:
            raise RuntimeError(str(error)) from None
        return tensor.untyped_storage()

    @functools.wraps(release)
    def _release_ipc_counter_cuda(handle: Any, loan: int, *rest: Any) -> Any:
        if not isinstance(handle, Region):
            return release(handle, loan, *rest)
        handle.give_back(loan)
        return None

    storage._share_cuda_ = _share_cuda_
    storage._new_shared_cuda = staticmethod(_new_shared_cuda)
    storage._release_ipc_counter_cuda = staticmethod(_release_ipc_counter_cuda)


def _lend(storage: Any) -> tuple[Region, int, int] | None:
    """None: it is torch's to send."""
    size_bytes, address, lender = storage.nbytes(), storage.data_ptr(), _lender()
    try:
        if not size_bytes:
            return None
        if not lending.is_borrowed(address):
            return None if lender is None else lender.lend(address, size_bytes, storage, _bring_back, Sent)
    except (SalusError, OSError) as error:
        say(str(error))
        return None
    raise RuntimeError(NOT_SENT_ON)


def _wait_for_stream(device: Any) -> None:
    """What was computed on this thread's stream so far is there when the other process looks at it."""
    if device.type == "cuda":
        _torch.cuda.current_stream(device).synchronize()
