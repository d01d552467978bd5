"""What a library keeps of the output when it is imported writes to the worker's log after the fork."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, os, sys
from springtide.runtime.zygote.output import redirect_output, use_log_streams
use_log_streams()
handler = logging.StreamHandler()
sys.stdout.write("before\\n")
if os.fork() == 0:
    redirect_output(sys.argv[1])
    handler.emit(logging.makeLogRecord({"msg": "by logging"}))
    sys.stdout.write("\\ud800 by print\\n")
    os._exit(0)
os.wait()
"""


def test_handlers_of_logging_and_print_write_to_the_log(tmp_path):
    log = tmp_path / "logs" / "a.log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log)], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "before\n"
    assert not done.stderr
    assert log.read_text() == "by logging\n\\ud800 by print\n"
