"""`springtide policies`: lists scheduling policies, strategies of loans and packers."""

from __future__ import annotations

import click

from springtide.cli.session import Session, common_options
from springtide.cli.tables.columns import align


@click.command()
@common_options
@click.pass_obj
def policies(session: Session) -> None:
    """List the scheduling policies, and the strategies of loans and packers of shares that go around them."""
    from springtide.scheduling.registry import PACKER_NAMES, POLICY_NAMES, STRATEGY_NAMES, describe_policy

    known = {name: describe_policy(name) for name in POLICY_NAMES}
    strategies = {name: describe_policy(name) for name in STRATEGY_NAMES}
    packers = {name: describe_policy(name) for name in PACKER_NAMES}
    rows = [*known.items(), *((f"{name}/POLICY", line) for name, line in {**strategies, **packers}.items())]
    hint = (
        f"use one: springtide up --policy {POLICY_NAMES[0]} | "
        f"compare: springtide simulate --policy {','.join(POLICY_NAMES)} | "
        "loans: springtide up --slots 4 --pools inference=2 --policy tide/springtide"
    )
    listed = [{"name": name, "description": line, "kind": "policy"} for name, line in known.items()]
    listed += [{"name": name, "description": line, "kind": "loans"} for name, line in strategies.items()]
    listed += [{"name": name, "description": line, "kind": "shares"} for name, line in packers.items()]
    session.answer(listed, align(("POLICY", "WHAT IT DOES"), rows), hint)
