"""Several devices under one service. Here it is the processor, as if there were two of it."""

from __future__ import annotations

import pytest

from salus.cli.serve import _with_room
from salus.client.environment import environment_for, visible_gpus
from salus.core.model import GpuConfig
from salus.errors import RequestRejected, SalusError
from salus.protocol import messages as msg
from salus.service.devices import Device, allowed
from salus.service.gpu import Gpu, choose_all
from tests.service.harness import eventually, finish

GIB = 1 << 30
CONFIG = GpuConfig(capacity_bytes=8 * GIB)
GPUS = [Gpu(f"GPU-{letter * 4}", index, "some", 8 * GIB, 0) for index, letter in enumerate("abc")]
DEVICES = [Device(CONFIG, gpu, number) for number, gpu in enumerate(GPUS[1:])]
"""The first of the three is not shared."""
TWO = ("--device", "host:2", "--capacity", "4GiB", "--policy", "fifo")
LARGE = ("--ephemeral", "3GiB")


@pytest.mark.parametrize(
    ("names", "visible", "found"),
    [
        (None, None, [0, 1]),
        ("2", None, [1]),
        ("GPU-bbbb,2", None, [0, 1]),
        (None, "2,1", [0, 1]),
        (None, "0,2", [1]),
        (None, "GPU-cc", [1]),
        ("1,2", "2", [1]),
    ],
)
def test_a_job_may_run_on_what_it_names_and_its_user_lets_it_see(names, visible, found):
    assert allowed(DEVICES, names, visible) == found


@pytest.mark.parametrize(
    ("names", "visible", "said"),
    [
        ("0", None, r"--gpu: this service has no GPU 0; it shares: 1 \(GPU-bbbb\), 2 \(GPU-cccc\)"),
        ("", None, r"--gpu: this service has no GPU"),
        (None, "0", r"CUDA_VISIBLE_DEVICES is 0, which hides what this service shares: .*; unset it"),
        ("1", "2", r"CUDA_VISIBLE_DEVICES is 2"),
    ],
)
def test_what_is_not_shared_is_refused_with_what_is(names, visible, said):
    with pytest.raises(RequestRejected, match=said):
        allowed(DEVICES, names, visible)


def test_on_the_processor_it_does_not_matter_which_gpus_the_user_sees():
    assert allowed([Device(CONFIG)], None, "7") == [0]


def test_a_service_takes_all_gpus_or_those_it_is_told():
    assert choose_all(GPUS, None) == GPUS
    assert choose_all(GPUS, "2, GPU-aaaa,2") == [GPUS[0], GPUS[2]]
    with pytest.raises(RequestRejected, match="there is no GPU 9"):
        choose_all(GPUS, "0,9")


def test_a_job_sees_the_gpu_it_was_placed_on_unless_it_is_to_see_none():
    job = msg.Registered("1", "token", "GPU-bbbb")
    assert environment_for(job, {"CUDA_VISIBLE_DEVICES": "1,2"})["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"
    assert environment_for(job, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}) == "1,2"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) is None


def test_jobs_go_where_there_is_room_and_each_device_has_its_own_lanes(serve):
    service = serve(*TWO)
    jobs = [service.job("--name", name, *LARGE, iterations=1200, seconds=0.005) for name in "ab"]
    for name in "ab":
        service.when(name, "running")
    rows = service.jobs()
    assert {rows[name]["device"] for name in "ab"} == {"host0", "host1"}, "both run, though two do not fit on one"
    shown = service.salus("ps").stdout
    assert "gpu" in shown and "host1" in shown
    assert "memory of host1" in service.salus("top", "--once").stdout
    status = service.status()
    assert [one["jobs"] for one in status["devices"]] == [1, 1]
    assert status["capacity_bytes"] == 8 * GIB and status["free_bytes"] == 2 * GIB
    third = service.job("--name", "c", *LARGE, "--gpu", "1", iterations=5, seconds=0.001)
    assert eventually(lambda: service.jobs().get("c"), "it is there")["device"] == "host1"
    refused = service.salus("run", "--gpu", "7", "--", "true")
    assert refused.returncode == 2
    assert "salus: --gpu: this service has no GPU 7; it shares: 0 (host0), 1 (host1)" in refused.stderr
    finish(*jobs, third)
    assert service.salus("policy", "srtf").returncode == 0
    assert [one["policy"] for one in service.status()["devices"]] == ["srtf", "srtf"]
    service.stop()
    assert len(service.journals()) == 2
    for journal in service.journals():
        replayed = service.salus("replay", str(journal))
        assert replayed.returncode == 0, replayed.stderr


def test_after_a_restart_each_job_is_on_the_device_it_was_on(serve):
    service = serve(*TWO)
    jobs = [service.job("--name", name, *LARGE, iterations=400, seconds=0.005) for name in "ab"]
    for name in "ab":
        service.when(name, "running")
    before = {name: row["device"] for name, row in service.jobs().items()}
    service.kill()
    service.start()
    eventually(lambda: all(row["state"] == "running" for row in service.jobs().values()), "both run on")
    assert {name: row["device"] for name, row in service.jobs().items()} == before
    finish(*jobs)
    assert all(row["iterations"] == 400 for row in service.jobs().values())


def test_a_service_that_was_started_for_a_job_ends_when_no_device_has_one(serve):
    service = serve(*TWO, "--linger")
    jobs = [
        service.job("--name", name, *LARGE, iterations=count, seconds=0.01) for name, count in (("a", 5), ("b", 300))
    ]
    finish(jobs[0])
    eventually(lambda: service.jobs()["a"]["finished_at"] is not None, "the first has ended")
    finish(jobs[1])
    assert service.process.wait(timeout=10) == 0


def test_a_command_seen_before_goes_where_what_it_used_then_fits(serve):
    service = serve(*TWO)
    run = ("--name", "again")
    finish(service.job(*run, *LARGE, iterations=3, seconds=0.001))
    fills = service.job("--name", "fills", "--gpu", "0", *LARGE, iterations=600, seconds=0.005)
    service.when("fills", "running")
    second = service.job(*run, iterations=3, seconds=0.001)
    finish(second)
    with service.connect() as connection:
        rows = [row for row in connection.jobs(everything=True) if row["name"] == "again"]
    assert rows[-1]["device"] == "host1"
    assert service.jobs()["fills"]["finished_at"] is None
    finish(fills)


def test_a_gpu_that_others_have_filled_is_left_out_unless_it_was_named(capsys):
    full = Gpu("GPU-full", 0, "some", 8 * GIB, 8 * GIB)
    assert _with_room([full, GPUS[1]], 0, named=False) == [GPUS[1]]
    assert "GPU 0 (GPU-full) is full; it is not shared" in capsys.readouterr().err
    assert _with_room([full], 0, named=True) == [full]
    with pytest.raises(RequestRejected, match="every GPU here is full"):
        _with_room([full], 0, named=False)


@pytest.mark.parametrize("device", ["host:", "host:0", "host:²", "host:" + "9" * 5000, "cuda:2", "tpu"])
def test_a_device_that_is_none_gets_one_line(serve, device):
    refused = serve(start=False).salus("serve", "--device", device)
    assert refused.returncode == 2 and "expected auto, cuda, host, or host:N" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_long_names_and_many_jobs_do_not_blind_those_who_look(serve):
    service = serve(*TWO)
    with service.connect() as one, service.connect() as two:
        for launcher in (one, two):
            launcher.request(msg.Register("界" * 4000, ["界" * 2000], "/"))
        with service.connect() as looks:
            rows = looks.jobs()
    assert len(rows) == 2 and len(rows[0]["name"]) == 200


@pytest.mark.parametrize("field", ["duration_s", "persistent_bytes", "weight"])
def test_a_number_that_no_machine_holds_ends_that_connection_and_nothing_else(serve, field):
    service = serve(*TWO)
    with service.connect() as hostile, pytest.raises(SalusError):
        hostile.request(msg.Register("huge", ["x"], "/", **{field: 10**400}))
    finish(service.job("--name", "other", iterations=3, seconds=0.001))
