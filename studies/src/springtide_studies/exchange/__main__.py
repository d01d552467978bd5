"""`python -m springtide_studies.exchange`: the probes of gradient exchange, which a bench starts as processes."""

from __future__ import annotations

import argparse
import os
import sys

from springtide_studies.exchange import probe, smlt


def main(arguments: list[str]) -> int:
    """Run one probe and return the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m springtide_studies.exchange", description=__doc__)
    probes = parser.add_subparsers(dest="probe", required=True)
    for name, line in (
        ("sync", "time all-reduces over stores behind throttled links"),
        ("smlt-sync", "time SMLT's exchange of gradients beside Siren's and Cirrus's"),
    ):
        options = probes.add_parser(name, help=line)
        options.add_argument("--json", action="store_true", help="print the rows as JSON")
        options.add_argument("--small", action="store_true", help="fewer stores, up to four workers")
        options.add_argument("--seed", type=int, default=0, help="where the values come from")
    chosen = parser.parse_args(arguments)
    # Members inherit this: otherwise the bench would time several threads per member on two cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_probe = probe.run_probe if chosen.probe == "sync" else smlt.run_probe
    return run_probe(as_json=chosen.json, small=chosen.small, seed=chosen.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
