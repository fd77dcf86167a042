"""Reading traces and profiles, and saying what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from salus.core.model import Footprint
from salus.simulate.trace import TraceError, TraceJob, read_profile, read_trace, write_trace
from salus.simulate.workloads import generate

GOOD = "job_id,submit_time,duration,persistent,ephemeral\na,0,10,1GB,2GB\n"


def read(tmp_path: Path, text: str, **more) -> list[TraceJob]:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, capacity_bytes=16 * 10**9, **more)


def test_the_least_a_trace_needs(tmp_path):
    (job,) = read(tmp_path, GOOD)
    assert job == TraceJob("a", 0.0, 40, 0.25, Footprint(10**9, 2 * 10**9))


def test_everything_a_trace_can_say(tmp_path):
    text = (
        "name,job_id,submit_time,iterations,iteration_time,persistent,ephemeral,internal,utilization,weight,priority\n"
        "vgg,b,1m,100,200ms,1000,2000,3000,0.5,2,-3\n\n"
        "vgg,a,30s,100,200ms,1000,2000,,,,\n"
    )
    first, second = read(tmp_path, text)
    assert (first.job_id, first.utilization, first.weight) == ("a", None, 1.0)
    assert second == TraceJob("b", 60.0, 100, 0.2, Footprint(1000, 2000, 3000), 0.5, 2.0, -3, "vgg")


def test_what_is_written_is_read_back_the_same(tmp_path):
    jobs = generate(20, seed=1)
    write_trace(tmp_path / "out.csv", jobs)
    assert read_trace(tmp_path / "out.csv", capacity_bytes=16 * 10**9) == jobs


MODELS = (
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
    "0,1,0,600,vgg19,164,30\n1,1,30,100,resnet50,50,9\n"
)


def test_a_trace_of_models_takes_its_sizes_from_the_profile(tmp_path):
    path = tmp_path / "profile.csv"
    path.write_text(
        "workload,persistent_mb,ephemeral_mb\nvgg19_25,500,4000\nvgg19_50,600,6000\nvgg19_100,700,9000\nresnet50,1,2\n"
    )
    first, second = read(tmp_path, MODELS, profile=read_profile(path))
    assert (first.name, first.footprint) == ("vgg19_50", Footprint(600_000_000, 6_000_000_000))
    assert first.duration_s == pytest.approx(164)
    assert second.footprint == Footprint(1_000_000, 2_000_000)


def test_without_a_profile_the_catalogue_knows_the_paper_s_models(tmp_path):
    assert [job.name for job in read(tmp_path, MODELS)] == ["vgg19_50", "resnet50_50"]


def test_a_job_for_several_gpus_is_an_error_that_names_the_row_unless_it_is_to_be_ignored(tmp_path):
    several = MODELS.replace("1,1,30", "1,8,30")
    with pytest.raises(TraceError, match=r"trace.csv:3: row 2, column num_gpu: job 1 asks for 8 GPUs; expected 1"):
        read(tmp_path, several)
    assert len(read(tmp_path, several, ignore_num_gpu=True)) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty; expected a trace in CSV"),
        ("\n\n", "is empty"),
        ("job_id,submit_time,duration,persistent,ephemeral\n", "no rows"),
        (
            "job_id,duration,persistent,ephemeral\na,1,1,1\n",
            "trace.csv:1: column submit_time is missing; expected job_id,",
        ),
        (
            "job_id,submit_time,persistent,ephemeral\na,1,1,1\n",
            "column duration is missing; expected it, or both iterations",
        ),
        (GOOD.replace("10", "long"), "trace.csv:2: row 1, column duration: 'long' is not a time"),
        (GOOD.replace("10", "-10"), "row 1, column duration: '-10' is not a time"),
        (GOOD.replace("10", "0"), "row 1, column duration: 0 is out of range; expected a time above 0"),
        (GOOD.replace("1GB", "some"), "row 1, column persistent: 'some' is not a size"),
        (GOOD.replace("1GB", ""), "row 1, column persistent: is empty; expected a value"),
        (GOOD + "a,1,10,1GB,2GB\n", "row 2, column job_id: 'a' is the id of row 1 already; expected a new one"),
        (
            GOOD.replace("2GB", "20GB"),
            "row 1, column persistent: job a needs 19.6 GiB; expected at most the GPU's 14.9 GiB",
        ),
        (GOOD + "b,1\n", "trace.csv:3: row 2 has 2 columns; expected 5"),
        (
            GOOD.replace("ephemeral\na", "ephemeral,weight\na").replace("2GB", "2GB,heavy"),
            "column weight: 'heavy' is not a num",
        ),
        (GOOD.replace("ephemeral\na", "ephemeral,weight\na").replace("2GB", "2GB,0"), "expected a number above 0"),
        (
            GOOD.replace("ephemeral\na", "ephemeral,utilization\na").replace("2GB", "2GB,7"),
            "expected a number from 0 to 1",
        ),
        (GOOD.replace("ephemeral\na", "ephemeral,priority\na").replace("2GB", "2GB,1.5"), "expected a whole number"),
        (
            MODELS.replace("vgg19", "alexnot"),
            "row 1, column model_name: nothing is known of 'alexnot'; expected a workload",
        ),
        (MODELS.replace("600", "0"), "row 1, column iterations: 0 is out of range; expected a whole number, 1 or more"),
        (MODELS.replace("600", "nan"), "expected a whole number"),
        (MODELS.replace("600", "inf"), "expected a whole number"),
        ('job_id,"submit', "is not CSV text"),
        (GOOD.replace("duration", "submit_time"), "column submit_time is there twice"),
        (GOOD.replace("10", "9" * 400), "is longer than a thousand years"),
        (GOOD.replace("1GB", "9" * 400), "is more memory than there is"),
        (GOOD.replace("a,0", '"a\nb",0').replace("10", "x"), "row 1, column duration: 'x' is not a time"),
    ],
)
def test_bad_input_is_one_line_with_file_row_column_and_what_is_expected(tmp_path, text, complaint):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert complaint in str(caught.value)
    assert "trace.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.csv: there is no such file"):
        read_trace(tmp_path / "nowhere.csv", capacity_bytes=1)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path, capacity_bytes=1)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01" * 10)
    with pytest.raises(TraceError, match="is not CSV text"):
        read_trace(tmp_path / "binary.csv", capacity_bytes=1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("workload,persistent_mb\nvgg,1\n", "column ephemeral_mb is missing"),
        ("workload,persistent_mb,ephemeral_mb\nvgg,1,much\n", "row 1, column ephemeral_mb: 'much' is not a number"),
        ("workload,persistent_mb,ephemeral_mb\nvgg,-1,1\n", "row 1, column persistent_mb: -1 is out of range"),
        ("workload,persistent_mb,ephemeral_mb\nvgg,1,1\nvgg,1,1\n", "row 2, column workload: 'vgg' is there twice"),
    ],
)
def test_a_bad_profile_is_named_the_same_way(tmp_path, text, complaint):
    path = tmp_path / "profile.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_profile(path)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            GOOD.replace("job_id,", "job_id,wieght,", 1).replace("\na,", "\na,2,"),
            "column 'wieght' is not known; known are: job_id",
        ),
        ("job_id,submit_time,model_name,duration,itervals\na,0,vgg19,10,3\n", "column 'itervals' is not known"),
        ("job_id,submit_time,model_name,duration,persistant\na,0,vgg19,10,3\n", "column 'persistant' is not known"),
    ],
)
def test_an_unknown_column_is_named_together_with_the_known_ones(tmp_path, text, complaint):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path, capacity_bytes=64 * 10**9)
    assert f"trace.csv:1: {complaint}" in str(caught.value)
    assert "submit_time" in str(caught.value)


def test_an_unknown_column_of_a_profile_is_an_error_too(tmp_path):
    path = tmp_path / "profile.csv"
    path.write_text("workload,persistent_mb,ephemeral_mb,utilisation\nvgg19_5,1,2,0.5\n")
    with pytest.raises(TraceError, match="column 'utilisation' is not known; known are: workload"):
        read_profile(path)


def test_columns_of_public_cluster_traces_that_mean_nothing_here_are_passed_over(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval\na,me,1,0,5,vgg19,10,30\n")
    (job,) = read_trace(path, capacity_bytes=64 * 10**9)
    assert job.iterations == 5
