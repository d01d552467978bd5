from __future__ import annotations

import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.profiles import Profiles, choose_profiles, find_profiles, rate_at
from springtide.workloads.readers import read_trace

BERT = "global_batch_size,1,2,4\n64,1.5,2.5,nan\n128,0,,\n256,3,NaN,7\n"


def write(folder: Path, **tables: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for model, text in tables.items():
        (folder / f"{model}.csv").write_text(text)
    return folder


def test_nan_empty_and_zero_say_not_measured(tmp_path: Path) -> None:
    profiles = Profiles.read(write(tmp_path / "tables", bert=BERT, trace="job_id,submit_time\n1,2\n"))
    assert profiles.name == "tables"
    assert profiles.steps_per_s("bert", 64) == {1: 1.5, 2: 2.5}
    assert profiles.steps_per_s("bert", 256) == {1: 3.0, 4: 7.0}
    assert profiles.pairs == (("bert", 64), ("bert", 256))
    assert profiles.knows("bert", 64)
    assert not profiles.knows("bert", 128)


def test_devices_come_in_order_whatever_the_order_of_the_columns(tmp_path: Path) -> None:
    profiles = Profiles.read(write(tmp_path, m="global_batch_size,8,1\n64,2,1\n"))
    assert list(profiles.steps_per_s("m", 64)) == [1, 8]


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (("gpt2", 64), "tables has no model 'gpt2'; it knows bert"),
        (("bert", 32), "tables does not say how fast 'bert' runs at batch 32; it knows 64, 128, 256"),
        (("bert", 128), "does not say how fast 'bert' runs at batch 128"),
    ],
)
def test_an_unknown_pair_is_refused(tmp_path: Path, pair: tuple[str, int], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        Profiles.read(write(tmp_path / "tables", bert=BERT)).steps_per_s(*pair)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("global_batch_size,1,x\n64,1,2\n", "bert.csv line 1, column x: a number of devices belongs here"),
        ("global_batch_size,0\n64,1\n", "bert.csv line 1, column 0"),
        ("global_batch_size\n64\n", "bert.csv line 1: no column of a number of devices"),
        ("global_batch_size,1,1\n64,1,1\n", "bert.csv line 1, column 1: named twice"),
        ("global_batch_size,1\n64,-2\n", "bert.csv line 2, column 1: '-2' must be a finite number"),
        ("global_batch_size,1\n64,inf\n", "bert.csv line 2, column 1: 'inf' must be a finite number"),
        ("global_batch_size,1\n64,1\n64,2\n", "bert.csv line 3, column global_batch_size: batch 64 has a row already"),
        ("global_batch_size,1\n,2\n", "bert.csv line 2, column global_batch_size: it is empty"),
    ],
)
def test_bad_tables_are_refused_with_line_and_column(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        Profiles.read(write(tmp_path, bert=text))


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no scaling table"):
        Profiles.read(tmp_path)
    with pytest.raises(InvalidRequest, match="is not a folder"):
        Profiles.read(tmp_path / "missing")


def test_rates_between_counts_are_linear_and_flat_beyond() -> None:
    rates = {2: 10.0, 4: 20.0, 8: 16.0}
    assert [rate_at(rates, count) for count in (1, 2, 3, 4, 6, 8, 64)] == [10.0, 10.0, 15.0, 20.0, 18.0, 16.0, 16.0]
    assert rate_at({}, 4) == 0.0


def table(*sizes: int) -> str:
    return "global_batch_size,1,2\n" + "".join(f"{size},1,2\n" for size in sizes)


def test_the_nearest_folder_that_knows_all_pairs_is_found(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trace = data / "traces" / "t.csv"
    a100 = write(data / "throughputs_A100", bert=table(64), gpt2=table(128))
    t4 = write(data / "throughputs_T4", bert=table(64, 384))
    (data / "traces").mkdir()
    assert find_profiles(trace, [("bert", 64)]) == a100
    assert find_profiles(trace, [("bert", 384)]) == t4
    assert find_profiles(trace, []) == a100
    near = write(data / "traces" / "profiles-own", bert=table(64))
    assert find_profiles(trace, [("bert", 64)]) == near
    write(data / "traces", bert=table(64))
    assert find_profiles(trace, [("bert", 64)]) == data / "traces"
    assert find_profiles(data / "x" / "y" / "t.csv", [("gpt2", 128)]) == a100


def test_the_first_unknown_pair_is_named(tmp_path: Path) -> None:
    write(tmp_path / "throughputs_A100", bert=table(64))
    write(tmp_path / "throughputs_T4", cifar10=table(64, 128))
    pairs = [("cifar10", 64), ("gpt2", 32), ("cifar10", 128)]
    sentence = r"knows 'gpt2' at batch 32 \(throughputs_T4 comes closest\); name a folder that does with --profiles DIR"
    with pytest.raises(InvalidRequest, match=sentence):
        find_profiles(tmp_path / "t.csv", pairs)


def test_a_model_that_no_table_knows_is_named_with_line_and_column(tmp_path: Path) -> None:
    tables = write(tmp_path / "throughputs_A100", bert=table(64))
    path = tmp_path / "t.csv"
    header = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n"
    path.write_text(header + "0,0,5,bert,9,64,1,9\n1,0,5,bart,9,64,1,9\n2,0,5,bart,9,64,1,9\n")
    trace = read_trace(path)
    place = r"t.csv line 3, column model_name: "
    with pytest.raises(InvalidRequest, match=place + "no scaling table near .* knows 'bart' at batch 64"):
        choose_profiles(trace, path)
    for given in (tables, str(tables), Profiles.read(tables)):
        with pytest.raises(InvalidRequest, match=place + "throughputs_A100 has no model 'bart'; it knows bert"):
            choose_profiles(trace, path, given)
    with pytest.raises(InvalidRequest, match=place):
        read_trace(path, models=Profiles.read(tables))
    known = read_trace(path, limit=1)
    assert choose_profiles(known, path) == choose_profiles(known, path, tables) == Profiles.read(tables)


def test_no_folder_of_tables_at_all_is_said(tmp_path: Path) -> None:
    lonely = tmp_path / "a" / "b" / "c" / "t.csv"
    lonely.parent.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="no folder of scaling tables lies near"):
        find_profiles(lonely, [("bert", 64)])
