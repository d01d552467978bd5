"""Layer profiles in files: this platform's formats, and FuncPipe's symbols as plain arrays."""

from __future__ import annotations

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, LayerProfile, ModelProfile

MAX_PROFILE_BYTES = 64 << 20


class PaperProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FuncPipe's appendix A: s, a, o, g in bytes by layer, T_fc and T_bc in s [L][J] (null: does not fit), M in MB.

    W is in bytes per s, t_lat in s, s_0 in bytes; `micro_batch` in samples.
    """

    s: list[int]
    a: list[int]
    o: list[int]
    g: list[int]
    T_fc: list[list[float | None]]
    T_bc: list[list[float | None]]
    M: list[int]
    W: list[float]
    t_lat: float = 0.04
    beta: float = 1.0
    s_0: int = 300 * MIB
    micro_batch: int = 4
    model: str = "model"

    def as_profile(self) -> ModelProfile:
        """Convert to a ModelProfile. Raises InvalidRequest if the arrays differ in length."""
        lengths = {name: len(getattr(self, name)) for name in ("s", "a", "o", "g", "T_fc", "T_bc")}
        if len(set(lengths.values())) != 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise InvalidRequest(f"the profile's arrays must have one entry for each layer; they have {counts}")
        return ModelProfile(
            model=self.model,
            micro_batch_size=self.micro_batch,
            memory_mb=tuple(self.M),
            bytes_per_s=tuple(self.W),
            layers=tuple(
                LayerProfile(
                    name=f"layer{i}",
                    parameter_bytes=self.s[i],
                    activation_bytes=self.a[i],
                    output_bytes=self.o[i],
                    gradient_bytes=self.g[i],
                    forward_s=tuple(self.T_fc[i]),
                    backward_s=tuple(self.T_bc[i]),
                )
                for i in range(len(self.s))
            ),
            latency_s=self.t_lat,
            slowdown=self.beta,
            base_bytes=self.s_0,
            source="file",
        )


class _ProfileOutput(msgspec.Struct, frozen=True):
    """The output of `springtide profile --layers`: the profile, with information about its origin."""

    profile: ModelProfile


def decode_profile(data: bytes, origin: str) -> ModelProfile:
    """Decode a profile: a ModelProfile as JSON, the output of `springtide profile --layers`, or FuncPipe's symbols.

    `origin` names it in the error. Raises InvalidRequest.
    """
    try:
        keys = decode_json(data, dict[str, msgspec.Raw]).keys()
        if "profile" in keys:
            return decode_json(data, _ProfileOutput).profile
        if "T_fc" in keys:
            return decode_json(data, PaperProfile).as_profile()
        return decode_json(data, ModelProfile)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"{origin} is no layer profile ({error}); make one with `springtide profile FILE --layers`, or write "
            "one as docs/pipeline-plan.md says"
        ) from None
