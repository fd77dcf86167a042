"""The experiments of `salus bench`: what they have in common, and one of them from end to end on the processor."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from salus.bench import experiment, hooks, report, switch, switch_gpu
from salus.bench.experiment import Job, Ran, Settings, Steps, at_once, one_by_one
from salus.bench.experiments import fairness, jct, memory, overhead, packed, paging, preemption
from salus.errors import RequestRejected
from tests.service.harness import eventually

TINY = [Job(f"j{number}", "tiny", 8, 800, alone_s=1.0 + number, ephemeral="3GiB") for number in range(2)]
SETTINGS = Settings("cpu")
GIB = 1 << 30


def quiet(_: str) -> None:
    pass


def test_who_waits_for_memory_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(experiment, "READY_S", 60.0)
    says = "import time; print('ready', flush=True); time.sleep(60)"
    commands = {"there": [sys.executable, "-c", says], "waits": ["sleep", "60"]}
    started = {name: subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for name, run in commands.items()}
    asked = []

    def who_waits() -> set[str]:
        asked.append(1)
        return {"waits"} if len(asked) > 2 else set()

    try:
        experiment._wait_until_ready(started, who_waits)
        assert len(asked) >= 3
        assert all(process.poll() is None for process in started.values()), "nobody had to end for that"
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def test_a_benchmark_that_is_told_to_end_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "salus", "bench", "crowd", "--jobs", "3", "--seconds", "60"]
    bench = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    eventually(lambda: list(tmp_path.glob("salus-*/state/journal/*")), "it has begun")
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert not _processes_with(f"TMPDIR={tmp_path}")


def _processes_with(setting: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_a_step_is_done_once_and_remembered_until_the_settings_change(tmp_path):
    kept, done = tmp_path / "deep" / "result.json.partial", []

    def run() -> list[Ran]:
        done.append(1)
        return [Ran("a", 0.5, [1.0, 2.0])]

    first = Steps(kept, {"scale": 1.0}).runs("one", run)
    again = Steps(kept, {"scale": 1.0})
    assert again.runs("one", run) == first == [Ran("a", 0.5, [1.0, 2.0])]
    assert len(done) == 1 and len(again) == 1
    assert len(Steps(kept, {"scale": 2.0})) == 0, "other settings are another experiment"
    kept.write_text("{ this was cut off")
    assert len(Steps(kept, {"scale": 1.0})) == 0
    again.forget()
    assert not kept.exists()


def test_what_came_of_it_is_judged_with_the_failures_counted():
    sides = {
        "one by one": [Ran("a", 0.0, [1.0, 10.0]), Ran("b", 0.0, [11.0, 20.0])],
        "time-slicing": [Ran("a", 0.0, [1.0, 12.0]), Ran("b", 0.0, [], failed="out of memory")],
        "salus": [Ran("a", 0.0, [1.0, 4.0]), Ran("b", 0.0, [1.0, 4.0])],
    }
    steps = Steps(None, {})
    for name, ran in sides.items():
        steps.runs(name, lambda ran=ran: ran)
    result = packed.run_tuning(SETTINGS, steps, quiet)
    assert result["sides"]["salus"]["times_faster"] == 5.0
    assert result["sides"]["time-slicing"]["failed"] == 1
    *rows, (_, _, _, met) = packed.verdicts_tuning(result)
    assert met and any("1 failed" in value for _, value, _, _ in rows)


def test_parts_are_judged_by_what_each_should_have():
    # A hundred iterations a second in all: alone, then halves, then the last one gets nothing.
    ends = [
        [i / 100 for i in range(1000)] + [10 + i / 50 for i in range(1000)],
        [10 + i / 50 for i in range(1000)],
        [29.99],
    ]
    ran = [Ran(str(number), 0.0, times) for number, times in enumerate(ends)]
    found = fairness._stages(ran, (1, 1, 1), 10.0)
    assert found["iterations_a_second"][1] == pytest.approx([50, 50, 0], rel=0.01)
    assert found["total_to_alone"][1] == pytest.approx(1.0, rel=0.01)
    assert found["off_by"] > 0.9, "the third should have had a third"


def test_overhead_is_told_from_the_weather():
    bare = [0.010 + 0.001 * (number % 7) for number in range(40)]
    salus, again = [one + 0.00026 for one in bare], [one + 0.00013 for one in bare]
    found = overhead._compare({"model": "tiny", "seconds": {"bare": bare, "salus": salus, "again": again}})
    assert found["ratio"] == pytest.approx(1.015) and found["bare_to_bare"] == pytest.approx(1.01)
    assert found["error"] < 1e-9 and found["turns"] == 40
    assert overhead._compare({"model": "tiny", "failed": "no"}) == {"failed": "no"}


def test_of_an_iteration_that_is_under_way_a_part_counts():
    one = Ran("a", 0.0, [1.0, 2.0, 5.0, 6.0])
    assert fairness._iterations(one, 1.0, 0.5, 4.5) == pytest.approx(0.5 + 1.0 + 0.5)
    assert fairness._iterations(one, 1.0, 2.0, 4.0) == 0.0


def test_iterations_that_follow_one_another_are_one_span_of_computing():
    one = Ran("a", 0.0, [1.0, 2.0, 3.1, 9.0, 10.0])
    assert preemption._spans(one, 1.0) == [(0.0, 3.1), (8.0, 10.0)]


def test_memory_is_told_by_model_and_drawn(tmp_path):
    steps = Steps(None, {})
    rows = [{"name": "alexnet", "persistent": 500.0, "ephemeral": 900.0, "internal": 600.0, "failed": None}]
    rows += [{**rows[0], "name": "googlenet", "failed": "out of memory"}]
    steps.rows("alexnet googlenet", lambda: rows)
    result = memory.run(Settings("cuda", jobs=2), steps, quiet)
    told = memory.verdicts(result)
    assert told[0][:2] == ("alexnet, batch 25", "persistent 500 MiB, ephemeral 900 MiB, internal 600 MiB")
    assert told[1][1] == "out of memory"
    memory.draw(result, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000
    with pytest.raises(RequestRejected, match="there is no GPU here"):
        memory.run(SETTINGS, steps, quiet)


def test_the_simulator_is_asked_about_the_same_jobs():
    jobs = [Job("long", "tiny", 1, 100, 0.0, alone_s=10.0), Job("short", "tiny", 1, 10, 1.0, alone_s=1.0)]
    ran = [Ran(job.name, 0.0, [1.0]) for job in jobs]
    whole, half = dict.fromkeys(("long", "short")), dict.fromkeys(("long", "short"), 0.5)
    # First come, first served: the short one waits for nine seconds.
    assert jct._simulated(jobs, ran, "fifo", whole, 1.0, SETTINGS) == pytest.approx((10 + 10) / 2, rel=0.02)
    assert jct._simulated(jobs, ran, "srtf", whole, 1.0, SETTINGS) == pytest.approx((11 + 1) / 2, rel=0.02)
    row = {"persistent_bytes": GIB, "ephemeral_bytes": GIB, "internal_bytes": GIB, "utilization": None}
    seen = [replace(one, row=row) for one in ran]
    small = Settings("cuda", capacity="6GiB")
    assert jct._simulated(jobs, seen, "pack", half, 1.0, small) == pytest.approx((10 + 1) / 2, rel=0.02), "side by side"
    assert jct._simulated(jobs, seen, "pack", whole, 1.0, small) == pytest.approx((11 + 2) / 2, rel=0.02), (
        "at half the speed"
    )
    assert jct._simulated(jobs, [ran[0], replace(ran[1], failed="died")], "fifo", whole, 1.0, SETTINGS) is None


def test_what_jobs_get_done_side_by_side_is_taken_from_the_side_without_salus():
    """Ten seconds and ten seconds at once: in twenty with no loss and no gain, in sixteen if they fill gaps."""
    jobs = [Job(name, "tiny", 1, 100, 0.0, alone_s=10.0) for name in "ab"]
    loads = dict.fromkeys("ab")

    def found(seconds: float, failed: int = 0) -> float:
        return jct._side_by_side(jobs, loads, {"avg_jct_s": seconds, "failed": failed})

    assert found(20.0) == pytest.approx(1.0, abs=0.01)
    assert found(16.0) == pytest.approx(1.25, abs=0.01)
    assert found(25.0) == pytest.approx(0.8, abs=0.01)
    assert found(16.0, failed=1) == 1.0, "those that ran are not all"


def test_memory_that_is_shared_by_mps_and_by_salus_is_told_in_jobs_that_fit():
    side = {"makespan_s": 2.0, "failed": 0, "why": None, "times_faster": 8.0}
    result = {
        "jobs": 16,
        "sides": {
            "one by one": {**side, "makespan_s": 16.0, "times_faster": 1.0, "gpu_gib": 0.0},
            "MPS": {**side, "gpu_gib": 16.0},
            "salus, MPS": {**side, "gpu_gib": 4.0},
        },
    }
    told = {what: (value, met) for what, value, _, met in packed.verdicts_tuning(result)}
    assert told["Salus with MPS against MPS, memory"] == ("0.25", True)
    fit = told["jobs that fit on 16 GiB, Salus with MPS against MPS"]
    assert fit == ("64 against 16, 4.0 times as many", True)


def test_paging_is_told_against_room_for_all(tmp_path):
    row = {"persistent_bytes": 4 * GIB, "paged_out_bytes": 0, "paged_out_ns": 0, "paged_in_bytes": 0, "paged_in_ns": 0}
    moved = {
        **row,
        "paged_out_bytes": 40 * GIB,
        "paged_out_ns": 10**9,
        "paged_in_bytes": 40 * GIB,
        "paged_in_ns": 10**9,
    }
    steps = Steps(None, {})
    steps.runs("room for all", lambda: [Ran("a", 0.0, [10.0], gpu_bytes=36 * GIB, row=row)])
    steps.runs("16GiB", lambda: [Ran("a", 0.0, [11.0], gpu_bytes=16 * GIB, row=moved)])
    result = paging.run(Settings("cuda"), steps, quiet)
    *_, tight, (_, slower, _, met) = paging.verdicts(result)
    assert "40 GiB out at 40 GiB/s" in tight[1] and slower == "1.10" and met
    paging.draw(result, tmp_path / "paging.png")
    with pytest.raises(RequestRejected, match="there is no GPU here"):
        paging.run(SETTINGS, steps, quiet)


def test_jobs_run_one_by_one_at_once_and_under_salus_and_one_that_fails_is_counted():
    pytest.importorskip("torch")
    first, second = one_by_one(TINY, "cpu", quiet)
    assert len(first.ends_s) == len(second.ends_s) == 800
    assert first.ends_s[-1] <= second.ends_s[0], "one after the other"
    ran = at_once(TINY, "cpu", quiet, SETTINGS.service("fifo"))
    # The second may have the lease when the clock starts, for a quantum.
    assert ran[0].ends_s[-1] <= ran[1].ends_s[400], "in the order in which they came, though both are there"
    good, bad = at_once([TINY[0], Job("bad", "no such model", 1, 1)], "cpu", quiet)
    assert good.failed is None and "there is no model" in (bad.failed or "")


def test_an_experiment_from_end_to_end_that_was_interrupted_goes_on(tmp_path):
    pytest.importorskip("torch")
    out, plot = tmp_path / "pair.json", tmp_path / "pair.png"
    settings = Settings("cpu", scale=0.01)
    steps = Steps(tmp_path / "pair.json.partial", {"experiment": "pair", **asdict(settings)})
    steps.runs("one by one", lambda: [Ran("a", 0.0, [1.0, 60.0]), Ran("b", 0.0, [61.0, 120.0])])
    command = ["bench", "pair", "--device", "cpu", "--scale", "0.01", "--out", str(out), "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, "-m", "salus", *command],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in which 1 steps are done" in done.stderr
    found = json.loads(out.read_text())
    assert found["result"]["sides"]["one by one"]["makespan_s"] == 120.0, "it was not done again"
    assert found["result"]["sides"]["salus"]["failed"] == 0
    assert {"machine", "torch", "raw", "date"} <= set(found)
    assert plot.stat().st_size > 1000 and not (tmp_path / "pair.json.partial").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "--device: 'tpu' is not understood; expected auto, cuda or cpu"),
        (["--capacity", "much"], "--capacity"),
        (["--plot", "figure.doc"], "figure.doc: a plot is written as .png, .pdf or .svg"),
    ],
)
def test_wrong_options_get_one_line_before_any_work(options, said):
    done = subprocess.run(
        [sys.executable, "-m", "salus", "bench", "pair", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_evaluation_is_what_the_committed_results_say(tmp_path):
    root = Path(__file__).parent.parent.parent
    report.write(root / "benchmarks" / "results", tmp_path / "evaluation.md")
    made = (tmp_path / "evaluation.md").read_text()
    assert made == (root / "docs" / "evaluation.md").read_text(), "make it again: salus bench report"
    for drawn in report.draw(root / "benchmarks" / "results", tmp_path / report.FIGURES):
        assert (root / "docs" / report.FIGURES / drawn.name).exists(), "make it again: salus bench report"


def test_what_fell_short_has_a_reason_and_what_did_not_may_have_a_note(tmp_path):
    machine = {"cpu": "a processor", "cores": 2, "python": "3.12"}
    (tmp_path / "why.json").write_text(json.dumps({"gpu-shares.json": "because"}))
    for index, shown in ((0.5, "Why: because"), (0.99, "Note: because")):
        result = {"date": "2026-01-01", "machine": machine, "shares": {"jain": index}}
        (tmp_path / "gpu-shares.json").write_text(json.dumps(result))
        report.write(tmp_path, tmp_path / "evaluation.md")
        assert shown in (tmp_path / "evaluation.md").read_text()


def test_results_that_are_missing_are_said_to_be_and_broken_ones_are_named(tmp_path):
    report.write(tmp_path, tmp_path / "evaluation.md")
    assert (tmp_path / "evaluation.md").read_text().count("Not measured yet.") == len(report.EXPERIMENTS)
    (tmp_path / "gpu-jct.json").write_text("{")
    with pytest.raises(RequestRejected, match=r"gpu-jct.json: cannot be read as a result"):
        report.write(tmp_path, tmp_path / "evaluation.md")
    with pytest.raises(RequestRejected, match="there is no such folder"):
        report.write(tmp_path / "nowhere", tmp_path / "evaluation.md")


def test_a_hand_over_on_a_gpu_is_from_idle_to_ours_between_two_jobs():
    traces: list[list[list[object]]] = [[], []]
    for turn in range(100):
        at, mine, others = 1_000_000 * turn, traces[turn % 2], traces[turn % 2 - 1]
        # Every other time the GPU still works when the job yields.
        mine += [["idle" if turn % 4 < 2 else "yields", at], ["sorted", at + 10_000], ["promoted", at + 20_000]]
        mine += [["waited", at + 50_000], ["left", at + 60_000], ["passed", at + 70_000]]
        others += [["woke", at + (75_000 if turn % 4 else 5_000)], ["seen", at + 80_000], ["ours", at + 100_000]]
    found = switch_gpu.hand_overs(traces)
    assert found is not None and found["count"] == 100 - 2 * switch_gpu.FIRST - 1
    assert (found["median_us"], found["max_us"]) == (50.0, 100.0), "50 where the GPU had to be waited for"
    assert found["parts_us"]["idle to sorted"] == 10.0, "of those in which the GPU was idle"
    assert found["parts_us"]["promoted to waited"] == 30.0 and found["parts_us"]["seen to ours"] == 20.0
    assert (found["busy_us"][0], found["busy_us"][-1]) == (0.0, 50.0)
    assert 0.74 < found["asleep"] < 0.76, "the others were awake when it came"
    assert switch_gpu.hand_overs([trace[:60] for trace in traces]) is None, "those are too few"
    rows = switch_gpu.verdicts({"sides": {"every boundary": found}})
    assert [row[3] for row in rows] == [True, True, True, True]
    assert "seen to ours 20" in rows[-2][1]


def test_what_hooks_add_is_compared_round_by_round():
    """The machine gets slower by half in the middle, and one round is disturbed; what is added shows all the same."""
    bare = [0.004] * 50 + [0.006] * 50
    told = {"bare": bare, "salus": [seconds + 0.00003 for seconds in bare]}
    told["salus"][70] += 1.0
    found = hooks.compare(told)
    assert found["added_us"] == pytest.approx(30) and found["error_us"] < 1
    (row,) = hooks.verdicts({"models": {"lstm": found}})
    assert row[1:] == ("30 ± 0 us of 5000 us, 0.60%", "at most 1%", True)


def test_a_ratio_is_told_with_its_error():
    assert switch.trimmed_mean([1.0] * 9 + [100.0]) == 1.0
    assert switch.standard_error([1.0]) == float("inf")
    die = random.Random(1)
    samples = [[die.gauss(1.0, 0.1) for _ in range(50)] for _ in range(1000)]
    truly = statistics.stdev(map(switch.trimmed_mean, samples))
    assert statistics.mean(map(switch.standard_error, samples)) == pytest.approx(truly, rel=0.1)
