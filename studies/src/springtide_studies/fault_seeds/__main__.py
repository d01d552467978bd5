"""`python -m springtide_studies.fault_seeds --seed N --policy P`: run one seed again and tell its story."""

from __future__ import annotations

import argparse
import sys

from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import POLICY_NAMES, check_policy_name
from springtide_studies.fault_seeds.seeds import FaultRun, SeedOutcome, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run the seed; 1 if an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m springtide_studies.fault_seeds", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--policy", default="elastic", type=_policy, help="such as " + ", ".join(POLICY_NAMES))
    parser.add_argument("--faults", type=float, default=None, help="mean number of faults (default: drawn)")
    parser.add_argument("--shares", action="store_true", help="some jobs and services hold parts of their devices")
    parser.add_argument(
        "--more-faults", action="store_true", help="with clock jumps, slow disks, one-way networks, ..."
    )
    parser.add_argument("--quiet", action="store_true", help="only the result")
    chosen = parser.parse_args(arguments)
    lines: list[str] = []
    tell = None if chosen.quiet else lines.append
    result = run_seed(
        chosen.seed,
        chosen.policy,
        num_faults=chosen.faults,
        tell=tell,
        has_shares=chosen.shares,
        has_more_faults=chosen.more_faults,
    )
    out = sys.stdout
    for line in lines:
        out.write(line + "\n")
    out.write(_summary(result))
    return 1 if result.violation else 0


def _policy(name: str) -> str:
    try:
        check_policy_name(name)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _summary(result: SeedOutcome) -> str:
    words = [f"seed {result.seed}, {result.policy}: {result.num_steps} steps, {result.num_events} events"]
    words.append(f"{result.num_crashes} control-plane crashes, {result.num_refused_writes} late writes refused")
    words.append(f"{result.virtual_s:.1f} virtual seconds")
    ends = ", ".join(f"{job_id} {state}" for job_id, state in result.ends.items())
    verdict = f"VIOLATED {result.violation}: {result.detail}" if result.violation else "all invariants hold"
    return f"{'; '.join(words)}\n{ends}\n{verdict}\n"


__all__ = ["FaultRun", "main"]

if __name__ == "__main__":
    sys.exit(main())
