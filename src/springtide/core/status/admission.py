"""What users are told about the requests that a service's gateway lets in and refuses."""

from __future__ import annotations

import msgspec


class AdmissionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Admission to one service, as its gateway knows it since it started.

    `limit` is how many calls may be at work and waiting for the SLO to be kept (None: it has no SLO, none was needed
    yet, or it is out of reach). `refused` counts refused requests, `refused_lately` those of the last minute.
    `call_p99_s` is the p99 of answers that waited for no other call or, where such are fewer than twenty, of all calls
    from when a replica began with each (None: fewer than twenty). With `slo_is_out_of_reach` that is above the SLO.
    `notes` say the same in sentences; empty if there is nothing to say.
    """

    limit: int | None = None
    refused: int = 0
    refused_lately: int = 0
    call_p99_s: float | None = None
    slo_is_out_of_reach: bool = False
    notes: tuple[str, ...] = ()
