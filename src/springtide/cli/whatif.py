"""What there is to choose from: `policies`."""

from __future__ import annotations

import click

from springtide.cli.session import Session, common_options
from springtide.cli.tables import align


@click.command()
@common_options
@click.pass_obj
def policies(session: Session) -> None:
    """List the scheduling policies."""
    from springtide.policies.registry import POLICY_NAMES, describe_policy

    known = {name: describe_policy(name) for name in POLICY_NAMES}
    text = align(("POLICY", "WHAT IT DOES"), list(known.items()))
    hint = f"use one: springtide up --policy {POLICY_NAMES[0]} | compare: springtide simulate --policy " + ",".join(
        POLICY_NAMES
    )
    session.answer([{"name": name, "description": line} for name, line in known.items()], text, hint)
