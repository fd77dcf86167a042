"""CPU tensors in the arena of the host device, sent as torch sends CUDA tensors, and what children do with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions


def rebuild(*arguments: Any) -> torch.Tensor:
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined,unused-ignore]
    return reductions.rebuild_cuda_tensor(*arguments)


class Sent:
    """Pickled as `reduce_tensor` does it for a CUDA tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        tensor, storage = self.tensor, self.tensor._typed_storage()
        device, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        reductions.shared_cache[handle] = reductions.StorageWeakRef(storage)
        return rebuild, (
            type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), type(storage), tensor.dtype,
            device, handle, size, offset, tensor.requires_grad, counter, counter_offset, event, waits,
        )  # fmt: skip


class Model:
    """A model whose parameters and buffers are sent so."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __reduce__(self) -> Any:
        return rebuilt_model, (
            [(name, Sent(parameter)) for name, parameter in self.model.named_parameters()],
            type(self.model),
        )


def rebuilt_model(parameters: list[tuple[str, nn.Parameter]], kind: type[nn.Module]) -> nn.Module:
    model = kind()
    for name, parameter in parameters:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, parameter)
    return model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def train(model: nn.Module, turn: Any, done: Any, steps: int) -> None:
    """A worker of Hogwild, in turns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(steps):
        turn.acquire()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        done.release()


def double(inputs: Any, outputs: Any) -> None:
    """Writes into what it gets, and says so, until it gets None. The same tensor again is the same memory."""
    seen: dict[int, int] = {}
    while (tensor := inputs.get()) is not None:
        tensor.mul_(2)
        first = seen.setdefault(len(seen), tensor.data_ptr())
        outputs.put((float(tensor.sum()), tensor.data_ptr() == first))
        del tensor


def send_on(tensor: torch.Tensor, outputs: Any) -> None:
    try:
        tensor.untyped_storage()._share_cuda_()
        outputs.put("it was sent on")
    except RuntimeError as error:
        outputs.put(str(error))
