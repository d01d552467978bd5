"""What the readers make of small files of their formats, and how the door finds out which format a file has."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.formats import google, helios, philly, pollux, springtide
from springtide.workloads.profiles import Profiles
from springtide.workloads.readers import detect_format, read_trace
from springtide.workloads.rows import parse_moment_s
from springtide.workloads.trace import TraceJob

SAMPLES = Path(__file__).parent / "samples"
FORMATS = {
    "elasticflow.csv": "elasticflow",
    "elasticflow_cluster.csv": "elasticflow",
    "elasticflow_philly.csv": "elasticflow",
    "springtide.csv": "springtide",
    "pollux.csv": "pollux",
    "philly_log.json": "philly",
    "philly.csv": "philly-csv",
    "helios.csv": "helios",
    "google.csv": "google",
    "azure.csv": "azure",
}


def refuse(tmp_path: Path, name: str, old: str, new: str, read=read_trace) -> str:
    """The sentence about a sample in which `old` is replaced."""
    text = (SAMPLES / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidRequest) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_known_by_their_beginning(name: str, tmp_path: Path) -> None:
    assert detect_format(SAMPLES / name) == FORMATS[name]
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
    assert detect_format(packed) == FORMATS[name]
    if name != "azure.csv":
        assert read_trace(packed).jobs == read_trace(SAMPLES / name).jobs
        assert read_trace(packed).name == read_trace(SAMPLES / name).name


def test_a_damaged_header_still_tells_the_format(tmp_path: Path) -> None:
    assert "line 1: no column 'max_workers'" in refuse(tmp_path, "springtide.csv", "max_workers", "most")
    assert "line 1: no column 'gpu_num'" in refuse(tmp_path, "helios.csv", "gpu_num", "gpus")
    assert "line 1: no column 'model_name'" in refuse(tmp_path, "elasticflow.csv", "model_name", "net")


def test_an_unknown_header_or_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match=r"t.csv line 1: this header belongs to no known format \(elasticflow"):
        read_trace(path)
    with pytest.raises(InvalidRequest, match=r"no trace format 'swf'; choose auto, elasticflow"):
        read_trace(path, format="swf")
    with pytest.raises(InvalidRequest, match="counts requests to functions"):
        read_trace(SAMPLES / "azure.csv")


def test_a_format_can_be_named(tmp_path: Path) -> None:
    assert read_trace(SAMPLES / "pollux.csv", format="pollux").format == "pollux"
    with pytest.raises(InvalidRequest, match=r"pollux.csv line 1: no column 'gpu_num'|no column 'job_id'"):
        read_trace(SAMPLES / "pollux.csv", format="helios")


def test_the_platforms_own_trace_means_what_it_meant() -> None:
    trace = springtide.read(SAMPLES / "springtide.csv")
    assert [job.job_id for job in trace.jobs] == ["early", "late"]
    assert trace.jobs[0] == TraceJob(
        job_id="early",
        submit_s=10.0,
        num_steps=100,
        global_batch_size=128,
        num_devices=8,
        deadline_s=600.0,
        min_workers=2,
        max_workers=8,
        num_samples=12_800,
        samples_per_s_1=200.5,
        parallel_fraction=1.0,
    )
    # 6,401 samples are a hundred batches of 64 and one more.
    assert trace.jobs[1].num_steps == 101
    assert trace.jobs[1].is_best_effort


def test_a_springtide_row_is_checked(tmp_path: Path) -> None:
    for old, new, sentence in [
        ("2,8,600", "9,8,600", "line 3, column max_workers: 8 must be from min_workers (9) to 256"),
        ("200.5,1", "0,1", "line 3, column samples_per_s_1: a job that trains nothing"),
        ("200.5,1", "200.5,1.01", "line 3, column parallel_fraction: '1.01' must be"),
        ("8,600", "8,9", "line 3, column deadline_s: the deadline 9 lies before the submission at 10"),
    ]:
        assert sentence in refuse(tmp_path, "springtide.csv", old, new)


def test_pollux_lengths_are_those_of_the_published_runs() -> None:
    trace = pollux.read(SAMPLES / "pollux.csv")
    assert [(job.pair, job.num_steps, job.num_devices) for job in trace.jobs] == [
        (("cifar10", 2048), 3178, 6),
        (("bert", 384), 480, 12),
        (("yolov3", 9), 0, 1),
    ]
    assert trace.jobs[1].submit_s == 105.5
    assert trace.jobs[0].deadline_s is None
    assert not trace.jobs[0].is_best_effort
    assert "num_steps" in trace.drawn[0]


def test_a_philly_job_is_the_sum_of_its_attempts() -> None:
    trace = philly.read_json(SAMPLES / "philly_log.json")
    assert trace.skipped == {"never ran": 1}
    assert trace.jobs == (
        TraceJob(
            job_id="application_1506638472019_00003",
            submit_s=parse_moment_s("2017-10-06 23:00:00"),
            num_devices=1,
            duration_s=10.0,
            owner="2869ce/b",
        ),
        TraceJob(
            job_id="application_1506638472019_00001",
            submit_s=parse_moment_s("2017-10-07 01:11:00"),
            num_devices=4,
            duration_s=180.0,
            owner="ee9e8c/ce2d5f",
        ),
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"vc": "2869ce",', "", "line 22, column vc: this job has no such field"),
        ('"vc": "ee9e8c"', '"vc": NaN', "line 2: the object here is no JSON: NaN is no JSON number"),
        ('"vc": "ee9e8c"', '"vc": 3', "line 2, column vc: '3' is not a text"),
        ('"2017-10-07 01:13:09"', '"2017-10-07 01:12:08"', "line 2, column end_time: 2017-10-07 01:12:08 lies before"),
        ('"2017-10-07 01:13:09"', '"soon"', "line 2, column end_time: 'soon' is not a date"),
        ('"2017-10-07 01:11:00"', '"0000"', "line 2, column submitted_time: '0000' is not a date"),
        ("00003", "00001", "line 30, column jobid: 'application_1506638472019_00001' is already the job of line 2"),
        ('"attempts": [],', '"attempts": 7,', "line 22, column attempts: '7' is not a list"),
        ('"attempts": [],', '"attempts": [7],', "line 22, column attempts: '7' is not an object"),
        (
            '"2017-10-06 23:00:00"',
            '"9017-10-06 23:00:00"',
            "line 30, column submitted_time: '9017-10-06 23:00:00' is not",
        ),
        ('"gpus": ["gpu3"]', '"gpus": 8', "is not a machine with its gpus"),
        ('"user": "b"', '"user": "b', "line 42: the object here is no JSON: Invalid control character"),
        ('"user": "b"\n    }\n]', '"user": "b"\n    }', "line 44: the file ends within the array"),
        ('"user": "b"\n    }\n]', '"user": "b"\n    }\n] 7', "line 44: something follows the end of the array"),
        ("[\n    {", "[\n    7, {", "line 2: an object in braces belongs here"),
    ],
)
def test_bad_philly_logs_are_refused_with_line_and_field(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    found = refuse(tmp_path, "philly_log.json", old, new)
    assert sentence in found, found


def test_long_and_large_philly_logs_are_read_piece_by_piece(tmp_path: Path) -> None:
    job = (
        '{"status": "Pass", "vc": "v", "user": "u", "submitted_time": "2017-10-07 01:11:00", "jobid": "j%d", '
        '"attempts": [{"start_time": "2017-10-07 01:12:09", '
        '"end_time": "2017-10-07 01:13:09", "detail": [{"gpus": ["g"]%s}]}]}'
    )
    path = tmp_path / "log.json"
    # Objects that end just about where a piece ends, one far longer than a piece, and all of them on one line.
    path.write_text("[" + ",".join(job % (n, ', "x": "' + "é" * (n % 7) * 100 + '"') for n in range(3_000)) + "]")
    assert len(read_trace(path).jobs) == 3_000
    assert len(read_trace(path, limit=7).jobs) == 7
    path.write_text("[" + job % (1, ', "x": "' + "y" * 1_000_000 + '"') + "]")
    assert len(read_trace(path).jobs) == 1
    path.write_text("[" + job % (1, ', "x": "' + "y" * 20_000_000 + '"') + "]")
    with pytest.raises(InvalidRequest, match=r"log.json line 1: the object here is no JSON"):
        read_trace(path)
    path.write_text("[" * 1_000_000)
    with pytest.raises(InvalidRequest, match=r"log.json line 1"):
        read_trace(path)


def test_the_csv_of_philly_names_jobs_by_their_line() -> None:
    trace = philly.read_csv(SAMPLES / "philly.csv")
    assert [(job.job_id, job.num_devices, job.duration_s, job.owner) for job in trace.jobs] == [
        ("philly-3", 4, 2951.0, "6214e9"),
        ("philly-2", 1, 66.0, "11cb48"),
        ("philly-7", 2, 12.5, "6214e9"),
    ]
    assert trace.jobs[1].submit_s - trace.jobs[0].submit_s == 2932.0
    assert trace.skipped == {"never ran": 1, "asks for no GPU": 1}


def test_helios_leaves_out_what_needs_no_gpu_or_never_ran() -> None:
    trace = helios.read(SAMPLES / "helios.csv")
    assert [(job.job_id, job.num_devices, job.duration_s, job.owner) for job in trace.jobs] == [
        ("10004", 16, 10.0, "u3"),
        ("10001", 8, 1800.0, "u1"),
    ]
    assert trace.skipped == {"asks for no GPU": 1, "never ran": 1}
    assert trace.jobs[0].submit_s == 1585699230.0


def test_helios_dates_are_checked(tmp_path: Path) -> None:
    assert "helios.csv line 2, column submit_time: '2020-13-01' is not a date" in refuse(
        tmp_path, "helios.csv", "2020-04-01 00:01:04", "2020-13-01"
    )


def test_google_tasks_run_while_they_are_scheduled() -> None:
    trace = google.read(SAMPLES / "google.csv")
    assert [(job.job_id, job.submit_s, job.duration_s, job.owner) for job in trace.jobs] == [
        ("3418314-0", 600.0, 15.5, "user-a"),
        ("3418314-1", 600.5, None, "user-a"),
        ("6251234-7", 630.0, None, "user-b"),
    ]
    assert trace.skipped == {
        "submitted before or after the trace": 1,
        "submission of a task that was submitted before": 1,
    }


def test_google_rows_are_checked(tmp_path: Path) -> None:
    assert "google.csv line 2, column event type: '9' must be" in refuse(
        tmp_path, "google.csv", "600000000,,3418314,0,,0,", "600000000,,3418314,0,,9,"
    )
    assert "line 2, column timestamp: '-6' must be a whole number" in refuse(tmp_path, "google.csv", "600000000", "-6")
    assert "line 2: 12 fields where 13 columns are" in refuse(tmp_path, "google.csv", "600000000,,", "600000000,")
    assert "line 2, column timestamp: 600000000000000000 microseconds" in refuse(
        tmp_path, "google.csv", "600000000", "600000000000000000"
    )
    assert "line 9, column timestamp: 922337203685477580 microseconds" in refuse(
        tmp_path, "google.csv", "625500000", "922337203685477580"
    )


def test_what_a_format_does_not_tell_is_drawn_when_asked() -> None:
    tables = Profiles(name="tables", tables={"bert": {64: {1: 1.0, 8: 4.0}}})
    path = SAMPLES / "philly.csv"
    assert not any(job.is_complete for job in read_trace(path).jobs)
    drawn = read_trace(path, models=tables, seed=5)
    assert all(job.is_complete and job.deadline_s for job in drawn.jobs)
    assert len(drawn.drawn) == 3
    assert re.search("seed 5", drawn.drawn[0])
