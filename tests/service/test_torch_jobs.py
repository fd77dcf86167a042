"""Unmodified PyTorch scripts as jobs: the same results to the last bit, and iterations that are found."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = """
import hashlib, sys
import torch
torch.manual_seed(int(sys.argv[1])); torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
digest = hashlib.sha256()
for epoch in range(4):
    for x, y in torch.utils.data.DataLoader(data, batch_size=16, num_workers=int(sys.argv[2])):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    model.eval()
    with torch.no_grad():
        digest.update(model(data.tensors[0]).numpy().tobytes())
    model.train()
print(digest.hexdigest())
"""
ITERATIONS = 4 * 16 + 4
"""Training steps, and the evaluations."""


@pytest.mark.parametrize("workers", [0, 1], ids=["", "with a worker process for the data"])
def test_three_scripts_share_the_device_and_compute_what_they_compute_alone(serve, workers, tmp_path):
    service = serve("--policy", "fair", "--quantum", "5ms", "--capacity", "4GiB")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone = [
        subprocess.run(
            [sys.executable, script, str(seed), str(workers)], capture_output=True, text=True, check=True, env=clean
        )
        for seed in range(3)
    ]
    # The scripts are not told where Salus is: what `salus run` puts into their environment must be enough.
    del service.environment["PYTHONPATH"]
    jobs = [
        service.salus_in_background(
            "run",
            "--name",
            f"t{seed}",
            "--ephemeral",
            "3GiB",
            "--",
            sys.executable,
            str(script),
            str(seed),
            str(workers),
        )
        for seed in range(3)
    ]
    for job, bare in zip(jobs, alone, strict=True):
        output, errors = job.communicate(timeout=120)
        assert (job.returncode, errors) == (0, "")
        assert output == bare.stdout
    rows = service.jobs()
    assert [rows[f"t{seed}"]["iterations"] for seed in range(3)] == [ITERATIONS] * 3
    assert all(rows[f"t{seed}"]["gpu_time_s"] > 0 for seed in range(3))


def test_a_script_that_fails_fails_as_it_would_alone(serve, tmp_path):
    service = serve()
    script = tmp_path / "broken.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(3))\n")
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    done = service.salus("run", "--", sys.executable, str(script))
    assert done.returncode == alone.returncode == 1
    assert done.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]


def test_a_script_of_another_environment_needs_no_salus_there(serve, tmp_path):
    """The other environment has torch and everything it needs, linked, and nothing of Salus."""
    home = tmp_path / "other"
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "salus" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    python = str(home / "bin" / "python")
    missing = subprocess.run([python, "-c", "import torch, salus"], capture_output=True, text=True, check=False)
    assert "No module named 'salus'" in missing.stderr
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    service = serve()
    del service.environment["PYTHONPATH"]
    done = service.salus("run", "--name", "other", "--", python, str(script), "0", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert service.jobs()["other"]["iterations"] == ITERATIONS


def test_the_demo_runs_real_jobs_and_writes_its_timelines(serve, tmp_path):
    service = serve(start=False)
    options = ["--device", "cpu", "--policy", "fifo,srtf", "--scale", "0.05", "--out", str(tmp_path)]
    done = service.salus("demo", *options, timeout_s=580)
    assert done.returncode == 0, done.stderr
    assert "the losses of all jobs are the same to the last bit alone and under every policy" in done.stdout
    for name in ("long", "medium", "short", "tiny"):
        assert f"salus: {name} runs alone\n" in done.stderr, "the column alone is measured"
    page = (tmp_path / "demo.html").read_text()
    assert '"device":"processor"' in page and '"name":"long","colour":"#1f77b4"' in page
    for name in ("long", "medium", "short", "tiny", "fifo", "srtf", "avg queuing", "avg JCT", "makespan"):
        assert name in done.stdout
    assert (tmp_path / "demo.html").stat().st_size > 5000
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
