"""What users are told about the revisions of a service."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from springtide.control.records import ServiceRecord
from springtide.control.releases.steps import release_text
from springtide.core.status.revisions import RevisionStatus
from springtide.core.workload import InferenceService


def revision_statuses(record: ServiceRecord) -> tuple[RevisionStatus, ...]:
    """Every revision that the service still knows, the newest number last."""
    release, found = record.release, []
    weight = 0.0
    if release is not None:
        told = _told(record, release.service)
        is_canary = bool(release.terms.canary and told["num_ready"])
        weight = release.terms.canary if is_canary else 0.0
        found.append(
            RevisionStatus(
                state="canary" if is_canary else "starting",
                reason=release_text(record),
                weight=weight,
                began_at_s=release.began_at_s,
                **told,
            )
        )
    if not record.is_removed:
        reason = record.reason if record.state.value == "FAILED" else ""
        present = _told(record, record.service)
        found.append(
            RevisionStatus(
                state="current", reason=reason, weight=1.0 - weight, began_at_s=record.deployed_at_s, **present
            )
        )
    known = {each.revision for each in found}
    for past in record.past:
        if past.service.revision not in known:
            told = _told(record, past.service)
            found.append(
                RevisionStatus(
                    state=past.state,
                    reason=past.reason,
                    began_at_s=past.began_at_s,
                    ended_at_s=past.ended_at_s,
                    **told,
                )
            )
    return tuple(sorted(found, key=lambda each: each.revision))


def _told(record: ServiceRecord, service: InferenceService) -> dict[str, Any]:
    replicas = [replica for replica in record.replicas if replica.revision == service.revision]
    return {
        "revision": service.revision,
        "num_ready": sum(replica.is_ready for replica in replicas),
        "num_replicas": len(replicas),
        "source": PurePosixPath(service.entrypoint.source_path).name,
    }
