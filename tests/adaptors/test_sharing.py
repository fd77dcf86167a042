"""Tensors that a script sends to its other processes: real ones, torch's own pickling, memory of the host device."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from torch import multiprocessing, nn

from salus.adaptors import torch_sharing
from salus.client.lending import Lender
from tests.adaptors import sharing
from tests.adaptors.sharing import Model, Net, Sent
from tests.memory.test_arena import opened

WAIT_S = 60


class Memory:
    """An arena of the host device, and tensors in it."""

    def __init__(self) -> None:
        self.arena, self.played = opened()
        self.lender = Lender(self.arena, "host")
        self.fetched = 0

    def tensor(self, *shape: int, kind: str = "private") -> torch.Tensor:
        size = 4
        for one in shape:
            size *= one
        address = self.arena.alloc(kind, max(size, 1 << 21))
        assert address is not None
        storage = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.float32)
        return storage.view(shape).zero_()

    def move(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = self.tensor(*parameter.shape).copy_(parameter.data)

    def close(self) -> None:
        torch_sharing.lend_from(lambda: None, lambda: None)
        gc.collect()
        self.arena.close()
        self.played.close()


@pytest.fixture
def memory():
    found = Memory()
    torch_sharing.install()
    torch_sharing.lend_from(lambda: found.lender, lambda: None)
    yield found
    found.close()


@pytest.fixture
def context():
    return multiprocessing.get_context("spawn")


def join(*processes) -> None:
    for process in processes:
        process.join(WAIT_S)
        assert process.exitcode == 0


def hogwild(memory: Memory | None, context, workers: int = 3, steps: int = 4) -> list[list[float]]:
    """Workers train one model in turns. Without memory it lies where torch puts it, and they are calls."""
    torch.manual_seed(0)
    model = Net()
    turns = [(context.Semaphore(0), context.Semaphore(0)) for _ in range(workers)]
    if memory is None:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(workers)]
        for number in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(number)
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
    else:
        memory.move(model)
        processes = [
            context.Process(target=sharing.train, args=(Model(model), turn, done, steps)) for turn, done in turns
        ]
        for process in processes:
            process.start()
        for _ in range(steps):
            for turn, done in turns:
                turn.release()
                assert done.acquire(timeout=WAIT_S)
        join(*processes)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_processes_train_one_shared_model_as_they_would_without_salus(memory, context):
    assert hogwild(memory, context) == hogwild(None, context)
    memory.lender._looked_at = 0.0
    memory.lender.collect()
    assert memory.lender.count == 0, "all of them have ended, and nothing is lent any more"


@pytest.mark.parametrize("kind", ["private", "lane"])
def test_a_tensor_goes_through_a_queue_and_the_other_process_writes_to_it(memory, context, kind):
    inputs, outputs = context.Queue(), context.Queue()
    process = context.Process(target=sharing.double, args=(inputs, outputs))
    process.start()
    tensor = memory.tensor(100, kind=kind).fill_(1)
    part = tensor[10:20]
    for total, sent in ((20.0, part), (220.0, tensor), (440.0, tensor)):
        inputs.put(Sent(sent))
        assert outputs.get(timeout=WAIT_S)[0] == total
    assert tensor[10:20].tolist() == [8.0] * 10 and tensor[:10].tolist() == [4.0] * 10
    inputs.put(None)
    join(process)
    memory.lender.collect()
    assert memory.lender.count == 0


def test_what_arrived_cannot_be_sent_on_as_without_salus(memory, context):
    outputs = context.Queue()
    process = context.Process(target=sharing.send_on, args=(Sent(memory.tensor(4)), outputs))
    process.start()
    assert "received from another process" in outputs.get(timeout=WAIT_S)
    join(process)


def test_parameters_of_one_tensor_stay_views_of_one_another(memory, context):
    inputs, outputs = context.Queue(), context.Queue()
    process = context.Process(target=sharing.double, args=(inputs, outputs))
    process.start()
    whole = memory.tensor(2, 50).fill_(1)
    inputs.put(Sent(nn.Parameter(whole, requires_grad=False)))
    assert outputs.get(timeout=WAIT_S)[0] == 200.0
    assert whole.t()[3].tolist() == [2.0, 2.0]
    inputs.put(None)
    join(process)


def test_a_tensor_that_the_script_drops_after_it_was_sent_is_kept_until_it_arrives(memory, context):
    inputs, outputs = context.Queue(), context.Queue()
    tensor = memory.tensor(10).fill_(3)
    inputs.put(Sent(tensor))
    del tensor
    gc.collect()
    process = context.Process(target=sharing.double, args=(inputs, outputs))
    process.start()
    assert outputs.get(timeout=WAIT_S)[0] == 60.0
    inputs.put(None)
    join(process)


def test_what_does_not_lie_in_the_arena_is_left_to_torch(memory):
    with pytest.raises(RuntimeError):  # of torch: it is no CUDA storage
        torch.ones(4).untyped_storage()._share_cuda_()
    assert memory.lender.count == 0


def test_where_it_cannot_be_lent_it_is_said_and_torch_answers(memory, capsys):
    tensor = memory.tensor(4)
    memory.arena.fail_at(1)
    with pytest.raises(RuntimeError):
        tensor.untyped_storage()._share_cuda_()
    memory.arena.fail_at(0)
    said = capsys.readouterr().err.splitlines()
    assert said == ["salus: memory cannot be shared with another process: the driver refuses that"]
