"""Environments with packages of a workload's own: made once, torch as it is, and removed when they are the oldest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kits.runtime.tiny_wheels import make_wheel, requirements_from
from springtide.core.workload import Packages
from springtide.runtime.process.environments import EnvironmentCache, EnvironmentFailed, key_of, pins

SEEN = """
import json, importlib.metadata as m, sys
import springtide, tiny
print(json.dumps([tiny.VERSION, tiny.__file__.startswith(sys.prefix), m.version("torch")]))
"""


def make(cache: EnvironmentCache, packages: Packages) -> tuple[Path, list[str]]:
    told: list[str] = []
    made = cache.make(packages, {}, told.append)
    os.close(made.lock)
    return made.python, told


def test_a_key_is_of_all_that_decides_what_is_in_an_environment(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "tiny", "1.0")
    base = Packages(requirements=("a", "b"))
    key = key_of(base, {"torch": "2"})
    assert key == key_of(Packages(requirements=("b", "a", "b")), {"torch": "2"})
    assert key != key_of(base, {"torch": "3"})
    assert key != key_of(Packages(requirements=("a",)), {"torch": "2"})
    assert key != key_of(Packages(requirements=("a", "b"), python="/usr/bin/python3"), {"torch": "2"})
    file = Packages(requirements=(str(wheel),))
    before = key_of(file, {})
    assert before == key_of(file, {})
    os.utime(wheel, ns=(1, 1))
    assert key_of(file, {}) != before


@pytest.mark.slow
def test_own_packages_come_first_and_torch_is_the_platforms(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny", "1.0", needs=("torch", "springtide"))
    packages = Packages(requirements=tuple(requirements_from(tmp_path / "wheels", "tiny")))
    cache = EnvironmentCache(tmp_path / "cache")
    assert cache.find(packages) is None
    python, told = make(cache, packages)
    assert any("Successfully installed tiny-1.0" in line for line in told)
    seen = subprocess.run([python, "-c", SEEN], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == f'["1.0", true, "{pins()["torch"]}"]'
    # The second time it is there.
    assert make(cache, packages) == (python, [])
    found = cache.find(packages)
    assert found is not None
    os.close(found.lock)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_conflict_with_the_pins_is_told_with_them_and_leaves_nothing(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny", "1.0", needs=("torch<2",))
    packages = Packages(requirements=tuple(requirements_from(tmp_path / "wheels", "tiny")))
    cache = EnvironmentCache(tmp_path / "cache")
    with pytest.raises(EnvironmentFailed) as failure:
        make(cache, packages)
    sentence = str(failure.value)
    assert sentence.startswith("its packages cannot be installed: Cannot install")
    assert "tiny 1.0 depends on torch<2" in sentence
    assert f"workers keep the platform's torch=={pins()['torch']}" in sentence
    assert cache.find(packages) is None
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    assert make(cache, packages)[0].exists()


@pytest.mark.slow
def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path / "cache")
    packages = Packages(requirements=tuple(requirements_from(tmp_path, "absent==3")))
    with pytest.raises(EnvironmentFailed, match=r"Could not find a version .* absent==3"):
        make(cache, packages)
    for python, sentence in (("/none/python", "is no interpreter here"), ("/bin/echo", "is no interpreter here")):
        with pytest.raises(EnvironmentFailed, match=sentence):
            make(cache, Packages(python=python))


@pytest.mark.slow
def test_an_interpreter_of_ones_own_brings_its_packages(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "own")], check=True)
    (site,) = (tmp_path / "own").glob("lib/python*/site-packages")
    (site / "tiny.py").write_text("VERSION = 'mine'\n", encoding="utf-8")
    python, _ = make(EnvironmentCache(tmp_path / "cache"), Packages(python=str(tmp_path / "own" / "bin" / "python")))
    seen = subprocess.run([python, "-c", SEEN], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == f'["mine", false, "{pins()["torch"]}"]'


@pytest.mark.slow
def test_what_was_used_least_lately_goes_unless_it_is_in_use(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    for number in range(4):
        make_wheel(wheels, "tiny", f"{number}.0", num_bytes=1_000_000)
    several = [Packages(requirements=tuple(requirements_from(wheels, f"tiny=={number}.0"))) for number in range(4)]
    cache = EnvironmentCache(tmp_path / "cache", max_bytes=2_500_000)
    make(cache, several[0])
    held = cache.find(several[0])
    assert held is not None
    make(cache, several[1])
    os.utime(tmp_path / "cache" / key_of(several[0], pins()) / "complete", (1, 1))
    make(cache, several[2])
    found = [cache.find(packages) for packages in several]
    # The oldest is in use, so the next one went.
    assert [each is not None for each in found] == [True, False, True, False]
    for each in (held, *found):
        if each is not None:
            os.close(each.lock)
    os.utime(tmp_path / "cache" / key_of(several[0], pins()) / "complete", (1, 1))
    make(cache, several[3])
    found = [cache.find(packages) for packages in several]
    assert [each is not None for each in found] == [False, False, True, True]


@pytest.mark.slow
def test_two_that_need_the_same_make_it_once(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    packages = Packages(requirements=tuple(requirements_from(tmp_path / "wheels", "tiny")))
    results: list[tuple[Path, list[str]]] = []

    def run() -> None:
        results.append(make(EnvironmentCache(tmp_path / "cache"), packages))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0][0] == results[1][0]
    assert sorted(bool(told) for _, told in results) == [False, True]
