"""The whole tables of an application: what is read, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.pollux_tables import canonical, read_application, read_applications

DATA = Path(__file__).parents[4] / "shared" / "data" / "pollux" / "profiles"
PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,4,0.4,0.0\n1,8,0.8,0.0\n12,8,1.0,0.2\n12,4,0.6,0.2\n"
SCALABILITY = "local_bsz,num_nodes,num_replicas,step_time,sync_time\n4,6,6,1.0,0.6\n"
RUN = "progress,iteration,metric,grad_sqr,grad_var\n100,90,0.5,1,3\n200,190,0.6,1,1\n"


def write(root: Path, name: str = "toy", **files: str) -> Path:
    folder = root / name
    folder.mkdir()
    texts = {"placements": PLACEMENTS, "scalability": SCALABILITY, "validation-8": RUN, "validation-16": RUN} | {
        key.replace("_", "-"): text for key, text in files.items()
    }
    for stem, text in texts.items():
        (folder / f"{stem}.csv").write_text(text)
    return folder


def test_an_application_is_read_whole(tmp_path: Path) -> None:
    app = read_application(write(tmp_path))
    assert set(app.placements) == {(1,), (1, 2)}
    assert app.placements[1, 2].local_batch_sizes.tolist() == [4, 8], "in order, whatever the file's is"
    assert app.placements[1, 2].times_s.tolist() == [[0.6, 0.2], [1.0, 0.2]]
    assert app.scalability.tolist() == [[6, 6, 4, 1.0, 0.6]], "columns by their names"
    assert (app.initial_batch_size, app.max_batch_size, app.num_epochs) == (8, 16, 2)
    assert (app.min_local_size, app.max_local_size, app.fixed_batch_size) == (4, 8, None)
    assert app.runs[8].grad_var.tolist() == [3, 1]
    assert app.runs[16].steps.tolist() == [90, 190]


def test_what_the_authors_fix_is_known_by_the_name(tmp_path: Path) -> None:
    assert read_application(write(tmp_path, "ncf")).fixed_batch_size == 32768
    wide = PLACEMENTS + "2,16,2.0,0.1\n"
    assert read_application(write(tmp_path, "yolov3", placements=wide)).max_local_size == 8
    assert read_application(write(tmp_path, "wide", placements=wide)).max_local_size == 16


def test_a_ring_is_the_same_from_each_of_its_nodes() -> None:
    assert canonical((4, 1, 2)) == canonical((1, 2, 4)) == canonical((2, 4, 1)) == (1, 2, 4)
    assert canonical((4, 2, 1)) == (1, 4, 2), "the other way round it is another ring"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"placements": "placement,local_bsz,step_time,sync_time\n"}, "placements.csv line 2: no placement"),
        ({"placements": PLACEMENTS + "1x,4,0.4,0\n"}, "line 6, column placement: '1x' is not a placement"),
        ({"placements": PLACEMENTS + "21,4,0.4,0\n"}, "line 6, column placement: 21 is the ring 12 turned round"),
        ({"placements": PLACEMENTS + "1,4,0.4,0\n"}, "line 6, column local_bsz: 4 stands twice"),
        ({"placements": PLACEMENTS + "1,5,0.4,0.5\n"}, "line 6, column sync_time: 0.5 s of a step of 0.4 s"),
        ({"scalability": SCALABILITY + "4,6,5,1.0,0.6\n"}, "line 3, column num_replicas: 5 on 6 nodes"),
        ({"validation_8": RUN + "200,290,0.6,1,1\n"}, "validation-8.csv line 4, column progress: 200 is not above"),
        ({"validation_8": RUN + "300,290,0.6,0,0\n"}, "line 4, column grad_var: norm and variance are both 0"),
        ({"validation_8": RUN + "300,290,0.6,nan,1\n"}, "line 4, column grad_sqr: 'nan' must be a finite number"),
        ({"validation_8": "progress,iteration,metric,grad_sqr,grad_var\n"}, "validation-8.csv line 2: no epoch"),
        ({"validation_x": RUN}, "validation-x.csv: 'x' is no batch size"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_column(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_application(write(tmp_path, **files))


def test_a_folder_without_measurements_says_what_belongs_there(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "placements.csv").write_text(PLACEMENTS)
    assert list(read_applications(tmp_path)) == ["toy"], "without trainings it is no application"
    with pytest.raises(InvalidRequest, match=r"APPLICATION/placements\.csv"):
        read_applications(tmp_path / "half")
    with pytest.raises(InvalidRequest, match="not a folder"):
        read_application(tmp_path / "nowhere")


@pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements are not here")
def test_the_published_applications_are_those_of_the_artifact() -> None:
    apps = read_applications(DATA)
    assert {name: (app.initial_batch_size, app.max_batch_size, app.num_epochs) for name, app in apps.items()} == {
        "bert": (12, 384, 2),
        "cifar10": (128, 4096, 100),
        "deepspeech2": (20, 640, 80),
        "imagenet": (200, 12800, 90),
        "ncf": (256, 32768, 10),
        "yolov3": (8, 512, 50),
    }
    for app in apps.values():
        assert len(app.placements) == 108
        assert len(np.unique(app.scalability[:, :2], axis=0)) == 36
