"""How long the iterations of a tenant take when nobody is in their way: one reference for each batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

# An iteration counts as stretched above this multiple of its reference (the paper's eta_violation, plus one), if that
# is also by more than a millisecond: what the scheduler of a host adds to an iteration of 2 ms is no contention.
STRETCHED = 1.3
MIN_STRETCH_S = 0.001
# How far a reference follows an iteration that was longer: soon when nothing more could have been done for it (the
# model or its inputs are slower for good), else hardly.
_FOLLOW_UNHINDERED = 0.2
_FOLLOW_HINDERED = 0.01
_MAX_SIZES = 64


class ShareIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration that ended: a batch of so many items, in so many seconds from its start to its end."""

    batch_size: int
    duration_s: float


def reference_s(references: Mapping[int, float], batch_size: int) -> float:
    """Return how long an iteration of this batch size takes when nobody is in its way; 0.0: nothing is known.

    A size never seen is bounded by its neighbours: a batch takes at most as long as a larger one, and at most in
    proportion longer than a smaller one. So a larger batch is not taken for contention.
    """
    known_s = references.get(batch_size)
    if known_s is not None:
        return known_s
    bound_s = 0.0
    for size, duration_s in references.items():
        at_most_s = duration_s if size > batch_size else duration_s * batch_size / max(1, size)
        bound_s = at_most_s if not bound_s or at_most_s < bound_s else bound_s
    return bound_s


def stretch(references: Mapping[int, float], batch_size: int, duration_s: float) -> float:
    """Return the duration as a multiple of its reference if that counts as stretched, else 1.0 (Dilu, Algorithm 2).

    `duration_s` may be the age of an iteration that still runs: it will not become shorter.
    """
    expected_s = reference_s(references, batch_size)
    if expected_s <= 0.0 or duration_s <= STRETCHED * expected_s or duration_s <= expected_s + MIN_STRETCH_S:
        return 1.0
    return duration_s / expected_s


def learn(
    references: Mapping[int, float], finished: Sequence[ShareIteration], *, is_unhindered: bool
) -> dict[int, float]:
    """Return the references with these iterations taken in.

    A shorter one is the reference at once. A longer one draws it up: by a fifth of the way if `is_unhindered` (the
    tenant had its limit and nobody more than their due), so that whoever became slower for good is no emergency after
    some iterations, else by a hundredth. At most 64 sizes are kept, those seen last.
    """
    learnt = dict(references)
    follow = _FOLLOW_UNHINDERED if is_unhindered else _FOLLOW_HINDERED
    for iteration in finished:
        if iteration.duration_s <= 0.0:
            continue
        size = iteration.batch_size
        expected_s = reference_s(learnt, size)
        learnt.pop(size, None)
        if expected_s <= 0.0 or iteration.duration_s <= expected_s:
            learnt[size] = iteration.duration_s
        else:
            learnt[size] = expected_s + follow * (iteration.duration_s - expected_s)
        if len(learnt) > _MAX_SIZES:
            del learnt[next(iter(learnt))]
    return learnt
