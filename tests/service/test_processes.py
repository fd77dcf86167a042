"""Which processes of a job are managed: real torch scripts that fork, spawn, use pools and data loaders, and exec."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tests.service.harness import SOURCE, Service

pytest.importorskip("torch")

TRAIN = """
import multiprocessing, os, sys
import torch

torch.set_num_threads(1)

def train(times):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return times
"""
EACH_IN_ITS_PROCESS = """
if __name__ == "__main__":
    for times in (10, 20):
        process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(times,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""
POOL = """
def both_at_once(barrier_times):
    train(1)
    barrier.wait()
    return train(barrier_times)

barrier = multiprocessing.get_context("fork").Barrier(4)
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert pool.map(both_at_once, [99] * 4, chunksize=1) == [99] * 4
"""
PARENT_FIRST = """
train(3)
child = os.fork()
if child == 0:
    os._exit(0 if train(20) == 20 else 1)
assert os.waitpid(child, 0)[1] == 0
train(4)
"""
FORKED = """
child = os.fork()
if child == 0:
    train(20)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
FORKED_CHILD_USES_THE_GPU = """
from salus.adaptors import activate

# There is no GPU here.
activate.lease.Lease.attach = lambda lease, memory: False
torch.cuda.get_allocator_backend, torch.cuda.current_device = lambda: "native", lambda: 0
if os.fork() == 0:
    train(7)
    activate._memory._gpu_is_in_use()
    train(20)
    os._exit(0)
assert os.wait()[1] == 0
"""
DATA_LOADER = """
feature = torch.nn.Linear(4, 4).eval()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        with torch.no_grad():
            return feature(torch.ones(4))

if __name__ == "__main__":
    # Before the first iteration of the parent: the workers have been there first.
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context=sys.argv[1])
    data = [x.clone() for x in loader]
    train(len(data))
"""
REPLACES_ITSELF = """
if len(sys.argv) < 3:
    train(5)
    os.execv(sys.executable, [sys.executable, __file__, "-", "again"])
train(6)
"""
ASKS_WHETHER_THERE_IS_A_TORCH = """
import importlib.util

assert importlib.util.find_spec("torch") is not None
assert importlib.util.find_spec("torch").loader is not None
"""


RUNS_IT = """
import sys
from salus.client import launch, unseen
from salus.protocol.messages import Register

unseen.FIRST_LOOK_S = 0.1
look = unseen.Unseen.look

def look_and_tell(self, pids):
    came = look(self, pids)
    if self._found:
        open(sys.argv[1], "w").close()
    return came

unseen.Unseen.look = look_and_tell
sys.exit(launch.run(Register("j", sys.argv[2:], "/")))
"""
WAITS_UNTIL_IT_IS_SEEN = """
import os, sys, time
import torch

while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
train = torch.nn.Linear(2, 2)(torch.ones(2))
"""


@pytest.fixture
def service(serve) -> Service:
    started = serve()
    del started.environment["PYTHONPATH"]
    return started


def run(service: Service, text: str, *arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    """How many iterations were counted, and what was said."""
    script = service.folder / "script.py"
    script.write_text(text)
    done = service.salus("run", "--name", "j", "--", *prefix, sys.executable, str(script), *arguments)
    assert done.returncode == 0, done.stderr
    return service.jobs()["j"]["iterations"], done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_training_in_processes_one_after_the_other_is_managed(service, method):
    assert run(service, TRAIN + EACH_IN_ITS_PROCESS, method) == (30, "")


def test_of_a_pool_that_trains_one_worker_is_managed_and_the_others_say_so_once(service):
    iterations, said = run(service, TRAIN + POOL)
    assert iterations == 100
    assert said.count("\n") == 1 and "from another process already" in said


def test_the_child_of_a_parent_that_trains_runs_unmanaged_and_says_so(service):
    iterations, said = run(service, TRAIN + PARENT_FIRST)
    assert iterations == 7
    assert said.count("\n") == 1 and "from another process already" in said


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_leave_the_device_to_the_script_and_say_nothing(service, method):
    assert run(service, TRAIN + DATA_LOADER, method) == (24, "")


def test_where_the_device_is_a_gpu_a_forked_child_that_computes_on_the_processor_takes_no_part(service):
    on_gpu = ("env", "SALUS_GPU=GPU-x")
    iterations, said = run(service, TRAIN + FORKED, prefix=on_gpu)
    assert iterations == 0 and "unmanaged" not in said
    assert run(service, TRAIN + FORKED_CHILD_USES_THE_GPU, prefix=on_gpu) == (20, "")


def test_a_script_that_replaces_itself_is_managed_before_and_after(service):
    assert run(service, TRAIN + REPLACES_ITSELF) == (11, "")


def test_a_script_that_asks_for_torch_before_it_imports_it_is_managed(service):
    assert run(service, ASKS_WHETHER_THERE_IS_A_TORCH + TRAIN + "\ntrain(5)\n") == (5, "")


@pytest.mark.parametrize("replaced", [True, False])
def test_a_job_that_was_never_seen_is_named_at_its_end_with_the_reason(service, replaced):
    """The one that is seen runs its first iteration after it was looked at for the last time."""
    script, looked = service.folder / "waits.py", service.folder / "looked"
    script.write_text(WAITS_UNTIL_IT_IS_SEEN)
    job = [sys.executable, str(script), str(looked)]
    line = shlex.join(["env", "PYTHONPATH=/nowhere", *job] if replaced else job)
    done = subprocess.run(
        [sys.executable, "-c", RUNS_IT, str(looked), "bash", "-c", f"{line}; true"],
        env={**service.environment, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    (row,) = service.jobs().values()
    if replaced:
        assert done.stderr.startswith(f"salus: job {row['id']} ran without Salus: PYTHONPATH was replaced; add to it")
        assert done.stderr.count("\n") == 1 and f"salus install-hook --python {sys.executable}" in done.stderr
    else:
        assert (done.stderr, row["iterations"]) == ("", 1)
