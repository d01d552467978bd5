"""`springtide package` as a user meets it."""

import json

import pytest
from click.testing import CliRunner

from springtide.cli.main import cli


@pytest.mark.slow
def test_it_says_how_large_the_image_gets_and_writes_its_recipe(tmp_path):
    told = CliRunner().invoke(cli, ["package", "--out", str(tmp_path / "image")])
    assert told.exit_code == 0, told.output
    assert "torch" in told.output
    assert "container image, at most 10 GB: fits" in told.output
    assert "zip file, at most 250 MB unpacked: does NOT fit" in told.output
    assert f"docker build -t springtide {tmp_path / 'image'}" in told.output
    assert (tmp_path / "image" / "Dockerfile").is_file()


@pytest.mark.slow
def test_sizes_alone_write_nothing_and_json_is_one_document(tmp_path):
    told = CliRunner().invoke(cli, ["package", "--sizes-only", "--out", str(tmp_path / "image"), "--json"])
    assert json.loads(told.output)["fits_image"] is True
    assert not (tmp_path / "image").exists()


def test_somebody_elses_directory_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    told = CliRunner().invoke(cli, ["package", "--out", str(tmp_path)])
    assert told.exit_code == 2
    assert "something else" in told.output
