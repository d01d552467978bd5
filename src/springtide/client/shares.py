"""Parsing the options for a share of a device: `gpu=0.3`, `share=(0.3, 0.6)`, `share="auto"`, `memory="4GB"`."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_fractions, parse_size_bytes
from springtide.core.shares import Share, make_share

# A request, a (request, limit), or "auto" for the share of a profile.
ShareAsked = float | str | tuple[float, float] | None
MemoryAsked = str | int | None
Auto = Literal["auto"]
AUTO: Final[Auto] = "auto"
NO_PROFILE = (
    'share="auto" is what a profile says, and there is none of this file yet: `springtide profile FILE --shares` takes '
    "one, or name the share yourself, like share=(0.3, 0.6) (--share 0.3..0.6)"
)
_MB: Final = 1_000_000


def read_share(share: ShareAsked, memory: MemoryAsked = None, gpu: float | str = 1.0) -> Share | Auto | None:
    """The share that was asked for, "auto" if a profile decides it, or None for whole devices.

    `gpu` below 1 is a short form: the request, with twice as much as the limit. Raises InvalidRequest.
    """
    request = _gpu_request(gpu)
    if share is not None and request is not None:
        raise InvalidRequest(
            f"gpu={gpu!r} and share={share!r:.80} say the same thing twice; keep one (share=(0.3, 0.6) names the limit)"
        )
    memory_mb = read_memory_mb(memory)
    if is_auto(share):
        return AUTO
    if share is not None:
        return make_share(*parse_fractions(share), memory_mb)
    if request is not None:
        return make_share(request, None, memory_mb)
    return None


def settled_share(share: ShareAsked, memory: MemoryAsked = None, gpu: float | str = 1.0) -> Share | None:
    """The share to send. Raises InvalidRequest, also for "auto", which a profile should have replaced by now."""
    found = read_share(share, memory, gpu)
    if found == AUTO:
        raise InvalidRequest(NO_PROFILE)
    assert not isinstance(found, str)
    return found


def devices_asked(gpu: float | str) -> float:
    """Of how many devices each replica holds its share: 1 where `gpu` is a part of one. Raises InvalidRequest."""
    asked, _ = parse_fractions(gpu, "gpu", like="gpu=0.3")
    if asked <= 1.0:
        return 1
    return int(asked) if asked.is_integer() else asked


def is_auto(share: ShareAsked) -> bool:
    """Whether a profile decides the share."""
    return isinstance(share, str) and share.strip() == AUTO


def read_memory_mb(memory: MemoryAsked) -> int:
    """Device memory in whole MB, rounded up; 0 if not given. Raises InvalidRequest."""
    return 0 if memory is None else -(-parse_size_bytes(memory, "memory") // _MB)


def share_text(share: Share) -> str:
    """A share as users type it: 0.3..0.6."""
    return f"{share.request:g}..{share.limit:g}"


def share_option(share: Share | None) -> dict[str, Any]:
    """The share's part of the options of POST /v1/jobs and PUT /v1/services; empty for whole devices."""
    return {} if share is None else {"share": msgspec.to_builtins(share)}


def _gpu_request(gpu: float | str) -> float | None:
    """The request that `gpu` stands for; None for whole devices, or a share of each of several."""
    request, limit = parse_fractions(gpu, "gpu", like="gpu=0.3")
    if limit is not None:
        raise InvalidRequest(f"gpu={gpu!r} names a limit, too; write that as share=({request:g}, {limit:g})")
    return request if request < 1.0 else None
