"""`python -m springtide.backends.functions.emulator --state-dir D [--port 0] [--token T] [--config JSON]`."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

import msgspec

from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError
from springtide.perf.functions.services import emulator


def main(arguments: list[str]) -> int:
    """Read the arguments, serve, and return the exit code: 2 for what cannot be meant, 1 for what failed."""
    parser = argparse.ArgumentParser(prog="springtide.backends.functions.emulator", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="where its record, log and functions' files lie")
    parser.add_argument("--port", type=int, default=0, help="of the Lambda API (0: a free one, written to the record)")
    parser.add_argument("--token", default="", help="better given as SPRINGTIDE_EMULATOR_TOKEN; made up if missing")
    parser.add_argument("--config", default="", help="a file with an EmulatorConfig, or the JSON itself")
    options = parser.parse_args(arguments)
    token = options.token or os.environ.pop("SPRINGTIDE_EMULATOR_TOKEN", "") or secrets.token_hex(20)
    try:
        config = _config_of(options.config)
        # Imported here: a wrong configuration is told at once.
        from springtide.backends.functions.emulator.server import ignore_hang_up, run

        ignore_hang_up()
        return run(config, options.state_dir.absolute(), token, options.port)
    except (msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"the emulator's configuration cannot be read: {error}\n")
        return 2
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _config_of(text: str) -> EmulatorConfig:
    if not text:
        return EmulatorConfig(service=emulator())
    data = text.encode() if text.lstrip().startswith("{") else Path(text).read_bytes()
    return decode_json(data, EmulatorConfig)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
