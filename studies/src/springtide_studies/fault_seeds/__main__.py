"""`python -m springtide_studies.fault_seeds --seed N --policy P`: run one seed and tell its story, or play many."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable

from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import POLICY_NAMES, check_policy_name
from springtide_studies.fault_seeds.seeds import FaultRun, SeedOutcome, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run the seed and tell its story, or with --seeds many and tell what breaks; 1 if an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m springtide_studies.fault_seeds", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=None, help="play so many, from --seed on, in one process")
    parser.add_argument(
        "--policy", default=["elastic"], type=_policy, nargs="+", help="such as " + ", ".join(POLICY_NAMES)
    )
    parser.add_argument("--faults", type=float, default=None, help="mean number of faults (default: drawn)")
    parser.add_argument("--shares", action="store_true", help="some jobs and services hold parts of their devices")
    parser.add_argument(
        "--more-faults", action="store_true", help="with clock jumps, slow disks, one-way networks, ..."
    )
    parser.add_argument("--promises", action="store_true", help="jobs have profiles and tight deadlines")
    parser.add_argument("--devices", action="store_true", help="workers of some jobs hold several devices each")
    parser.add_argument("--quiet", action="store_true", help="only the result")
    chosen = parser.parse_args(arguments)
    if chosen.seeds is not None:
        return _play_many(chosen)
    if len(chosen.policy) > 1:
        parser.error("one seed is played under one policy")
    lines: list[str] = []
    result = _play(chosen, chosen.seed, chosen.policy[0], None if chosen.quiet else lines.append)
    out = sys.stdout
    for line in lines:
        out.write(line + "\n")
    out.write(_summary(result))
    return 1 if result.violation else 0


def _play(chosen: argparse.Namespace, seed: int, policy: str, tell: Callable[[str], None] | None = None) -> SeedOutcome:
    return run_seed(
        seed,
        policy,
        num_faults=chosen.faults,
        tell=tell,
        has_shares=chosen.shares,
        has_more_faults=chosen.more_faults,
        has_promises=chosen.promises,
        has_devices=chosen.devices,
    )


def _play_many(chosen: argparse.Namespace) -> int:
    """Play seed after seed, each under the next of the policies; tell each violation, and in the end the counts."""
    played, broken = Counter[str](), Counter[str]()
    for index in range(chosen.seeds):
        policy = chosen.policy[index % len(chosen.policy)]
        result = _play(chosen, chosen.seed + index, policy)
        played[policy] += 1
        if result.violation:
            broken[policy] += 1
            sys.stdout.write(f"VIOLATED {result.violation}: {result.command}\n{result.detail}\n")
            sys.stdout.flush()
    for policy, count in played.items():
        sys.stdout.write(f"{policy}: {count} seeds, {broken[policy]} violations\n")
    return 1 if broken else 0


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
