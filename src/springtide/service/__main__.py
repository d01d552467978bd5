"""`python -m springtide.service`: run the embedded platform in this process (what `springtide up` starts)."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path

from springtide.control.journal.retention import KEEP_ENDED, KEEP_STEPS, retention_of
from springtide.core.errors import SpringtideError
from springtide.core.workload import MAX_UNFINISHED
from springtide.service.assembly.function_settings import read_settings
from springtide.service.assembly.local import PlatformOptions, serve
from springtide.service.assembly.pool_settings import parse_pools
from springtide.service.server import configure_logging


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve. Exit codes: 0 for a regular end, 1 for a failure, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m springtide.service", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    parser.add_argument("--slots", type=int, default=None, help="device slots (default: GPUs, else cores)")
    parser.add_argument("--policy", default="springtide")
    parser.add_argument("--port", type=int, default=8787, help="0 takes a free port")
    parser.add_argument("--grpc-port", type=int, default=None, help="answer gRPC there, 0 takes a free port")
    parser.add_argument("--price", type=float, default=None, help="US dollars an hour of one device costs")
    parser.add_argument(
        "--pools", default="", help="slots that each pool owns, as inference=2 (default: all share them)"
    )
    parser.add_argument("--day", type=float, default=None, help="seconds after which the tide comes again")
    parser.add_argument("--functions", type=Path, default=None, help="the settings of a function service, as a file")
    parser.add_argument(
        "--max-unfinished", type=int, default=MAX_UNFINISHED, help="jobs and services at a time (0: any number)"
    )
    parser.add_argument("--journal-retention", default=KEEP_STEPS, help="how long steps are kept, at most so much")
    parser.add_argument("--keep-ended", default=KEEP_ENDED, help="how long ended jobs are shown")
    parsed = parser.parse_args(arguments)
    configure_logging()
    # What a crash of the interpreter was doing stands in the log.
    faulthandler.enable()
    try:
        return serve(
            PlatformOptions(
                state_dir=parsed.state.resolve(),
                num_slots=parsed.slots,
                policy=parsed.policy,
                port=parsed.port,
                grpc_port=parsed.grpc_port,
                usd_per_device_hour=parsed.price,
                pools=parse_pools(parsed.pools),
                day_s=parsed.day,
                max_unfinished=parsed.max_unfinished,
                keep=retention_of(parsed.journal_retention, parsed.keep_ended),
                functions=None if parsed.functions is None else read_settings(parsed.functions),
            )
        )
    except SpringtideError as error:
        sys.stderr.write(f"springtide: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
