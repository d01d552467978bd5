"""The digest of a submission under an Idempotency-Key: the same for the same request, whichever version took it in."""

from __future__ import annotations

import hashlib

from springtide.service.submission.schemas import JobIn

# The options in the order in which the first form had them, whose digests were of all fields.
_FIRST_OPTIONS = (
    *("deadline_s", "budget_usd", "global_batch_size", "batch", "length_unit", "num_epochs", "min_workers"),
    *("max_workers", "seed", "max_restarts", "grace_s", "checkpoint_interval_s", "num_virtual_shards", "params"),
    *("is_soft", "waits", "num_samples", "profile_steps_per_s", "step_profile", "on", "layer_profile", "is_fastest"),
    *("search", "batch_schedule", "function_workers", "stream", "study", "share"),
)


def request_digest(request: JobIn) -> str:
    """The digest of what the request sets, of secrets the names; a later version, with more options, gives the same."""
    secrets = request.options.secrets
    # A digest that the journal has must not tell a value to those who try many.
    text = request.model_dump_json(exclude_defaults=True, exclude={"options": {"secrets"}} if secrets else None)
    return digest(f"{text} {sorted(secrets)}" if secrets else text)


def is_of_request(known: str, request: JobIn) -> bool:
    """Whether that is a digest of this request, in this form or in the first one."""
    return known in (request_digest(request), _first_digest(request))


def digest(text: str) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _first_digest(request: JobIn) -> str:
    options = request.options
    if options.model_dump(exclude_defaults=True).keys() - set(_FIRST_OPTIONS) or request.source.folder is not None:
        return ""
    before = request.model_dump_json(include={"name", "source"}, exclude={"source": {"folder"}})[:-1]
    values = ",".join(options.model_dump_json(include={name})[1:-1] for name in _FIRST_OPTIONS)
    return digest(f'{before},"options":{{{values}}},{request.model_dump_json(include={"container"})[1:]}')
