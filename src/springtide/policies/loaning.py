"""One pool of machines for serving and training: any training policy on whatever a strategy of loans leaves to it.

FaPES (SoCC'24), sections 3.2 to 3.4. The strategy labels nodes, services are given their replicas on those that serve,
and the training policy decides about the rest as if it were all there is. See docs/policies/loaning.md.
"""

from __future__ import annotations

import msgspec

from springtide.core.decision import Plan, Policy, Snapshot
from springtide.policies.pools import Strategy


class Loaning(msgspec.Struct, frozen=True, kw_only=True):
    """A training policy under a strategy of loans."""

    strategy: Strategy
    training: Policy

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        raise NotImplementedError
