"""What an import has looked at, and what stands against forking a process after it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from springtide.runtime.zygote.libraries import ImportRecord, import_libraries

LIBRARY = """
import os
HOME = os.environ.get("LIBRARY_HOME")
IS_QUIET = "LIBRARY_QUIET" in os.environ
OTHERS = dict(os.environ)
try:
    import library_extra
except ImportError:
    pass
"""


def test_packages_and_variables_that_an_import_looks_for_are_recorded(tmp_path, monkeypatch):
    for name in ("library_of_test", "library_part"):
        (tmp_path / name).mkdir()
    (tmp_path / "library_of_test" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "library_of_test" / "part.py").write_text("import library_part")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIBRARY_QUIET", "1")
    monkeypatch.setenv("LIBRARY_OTHER", "1")
    kind = type(os.environ)
    with ImportRecord() as record:
        import_libraries([("library_of_test", "HOME"), ("library_of_test", "part")])
        # A folder that is a package only because no other one has the name.
    assert record.found >= {"library_of_test", "library_part"}
    assert record.missing == {"library_extra", "library_part"}
    # What is only passed by is not counted.
    assert {"LIBRARY_HOME", "LIBRARY_QUIET"} <= record.variables
    assert "LIBRARY_OTHER" not in record.variables
    assert type(os.environ) is kind
    assert os.environ["LIBRARY_OTHER"] == "1"
    for name in ("library_of_test", "library_of_test.part", "library_part"):
        sys.modules.pop(name)
    with pytest.raises(ImportError):
        import_libraries([("library_of_test", "nothing")])
    sys.modules.pop("library_of_test")


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("", ""),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
        ("child = subprocess.Popen(['sleep', '1'])", "another process"),
        ("os.symlink('/dev/zero', sys.argv[1])\nfile = open(sys.argv[1])", "opened /dev/zero"),
    ],
)
def test_a_process_with_threads_children_or_a_gpu_is_not_forked(tmp_path, before, told):
    script = f"""import os, subprocess, sys, threading, time
from springtide.runtime.zygote import libraries
libraries._GPU_DEVICES = ("/dev/zero",)
{before}
print(libraries.obstacle_to_forking())"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "gpu")], check=True, capture_output=True, text=True
    )
    assert told in done.stdout
    assert bool(done.stdout.strip()) is bool(told)
