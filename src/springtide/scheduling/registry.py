"""The list of policies, strategies of loans and packers of shares: the one place that knows them by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, cast, get_origin, get_type_hints

import msgspec

from springtide.core.decision import Policy
from springtide.core.errors import InvalidRequest


class _Entry(msgspec.Struct, frozen=True):
    """Where a policy is ("package.module:Class"), and its line if it is not its module's first."""

    target: str
    line: str = ""


# Modules are imported when they are asked for, so that a control plane loads the one policy that it runs.
_POLICIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "springtide": _Entry("springtide.scheduling.policies.springtide.policy:Springtide"),
        "elastic": _Entry("springtide.scheduling.policies.elastic:Elastic"),
        "edf": _Entry("springtide.scheduling.policies.edf:EarliestDeadlineFirst"),
        "fifo": _Entry("springtide.scheduling.policies.fifo:Fifo"),
        "elasticflow": _Entry("springtide_studies.rivals.policies.elasticflow:ElasticFlow"),
        "elasticflow-artifact": _Entry(
            "springtide_studies.rivals.policies.elasticflow:ElasticFlowArtifact",
            line="ElasticFlow as its published artifact decides, with its known faults.",
        ),
        "edf+admission": _Entry(
            "springtide_studies.rivals.policies.edf_variants:EdfAdmission",
            line="EDF that turns away deadlines it cannot make (ElasticFlow's variant).",
        ),
        "edf+elastic": _Entry(
            "springtide_studies.rivals.policies.edf_variants:EdfElastic",
            line="ElasticFlow's allocation without its admission (its EDF + elastic scaling).",
        ),
        "fapes": _Entry("springtide.scheduling.policies.fapes.policy:Fapes"),
        "goodput": _Entry("springtide.scheduling.policies.goodput.policy:Goodput"),
        "pollux": _Entry("springtide_studies.rivals.policies.pollux:Pollux"),
        "sia": _Entry("springtide_studies.rivals.policies.sia:Sia"),
        "chronus": _Entry("springtide_studies.rivals.policies.chronus:Chronus"),
        "gandiva": _Entry("springtide_studies.rivals.policies.gandiva:Gandiva"),
        "optimus": _Entry("springtide_studies.rivals.policies.optimus:Optimus"),
        "sjf": _Entry("springtide_studies.rivals.policies.sjf:ShortestJobFirst"),
        "static": _Entry("springtide_studies.rivals.policies.static:Static"),
        "themis": _Entry("springtide_studies.rivals.policies.themis:Themis"),
        "tiresias": _Entry("springtide_studies.rivals.policies.tiresias:Tiresias"),
        "optimus-oracle": _Entry(
            "springtide_studies.rivals.policies.tuned:OptimusOracle",
            line="Optimus as Pollux's published artifact plays it, every minute, told all speeds.",
        ),
        "tiresias-tuned": _Entry(
            "springtide_studies.rivals.policies.tuned:TiresiasTuned",
            line="Tiresias as Pollux's published artifact plays it, every minute, on tuned requests.",
        ),
    }
)
# Which servers serve and which train; each stands before a policy for training, as in `two-way/fapes`.
_STRATEGIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "tide": _Entry("springtide.scheduling.loans.tide:TideStrategy"),
        "two-way": _Entry(
            "springtide.scheduling.loans.reclaim:TwoWay",
            line="Loans with any server taken back by gain and cost (FaPES-Manager).",
        ),
        "one-way": _Entry(
            "springtide.scheduling.loans.reclaim:OneWay",
            line="Loans of which only what was loaned is taken back (FaPES, 7.1).",
        ),
        "dedicated": _Entry(
            "springtide.scheduling.loans.reclaim:Dedicated", line="Two pools of fixed size, without loans (FaPES, 7.1)."
        ),
    }
)
# Who sits beside whom on a device that is held in parts; each stands before any policy, as in `dilu/springtide`.
_PACKERS: Mapping[str, _Entry] = MappingProxyType(
    {
        "dilu": _Entry(
            "springtide.scheduling.sharing.packing:DiluPacker",
            line="Shares packed on few devices within bounds (Dilu, 3.3).",
        ),
        "infless-l": _Entry(
            "springtide_studies.rivals.policies.share_rivals:InflessLimit",
            line="Shares booked at their limit (INFless+-l in Dilu, 5.1).",
        ),
        "infless-r": _Entry(
            "springtide_studies.rivals.policies.share_rivals:InflessRequest",
            line="Shares held to their request (INFless+-r, 5.1).",
        ),
        "fast-gs": _Entry(
            "springtide_studies.rivals.policies.share_rivals:FastGsPacker",
            line="Shares booked at their limit, first fit (FaST-GS+, 5.1).",
        ),
        "exclusive": _Entry(
            "springtide_studies.rivals.policies.share_rivals:ExclusivePacker",
            line="A device of its own for everyone with a share.",
        ),
    }
)
_Kind = Literal["policy", "strategy of loans", "packer of shares"]
_ENTRIES: Mapping[_Kind, Mapping[str, _Entry]] = MappingProxyType(
    {"policy": _POLICIES, "strategy of loans": _STRATEGIES, "packer of shares": _PACKERS}
)


POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
STRATEGY_NAMES: tuple[str, ...] = tuple(_STRATEGIES)
PACKER_NAMES: tuple[str, ...] = tuple(_PACKERS)


def make_policy(name: str, **parameters: Any) -> Policy:
    """Build the policy of that name; what is not in `parameters` keeps its default.

    The name may carry parameters itself, as in `edf:caps=no` or `tiresias:thresholds_s=3250+7200:promotion_factor=8`:
    numbers, words, yes or no, and `+` between the items of a list. `STRATEGY/TRAINING`, as in `two-way/fapes:unit=1`,
    is a policy for training under a strategy of loans; `parameters` are those of the training policy. `PACKER/...`,
    as in `dilu/springtide`, is any policy beside a packer of shares.
    Raises InvalidRequest naming the known policies, or the parameters of this one.
    """
    first, _, rest = name.partition("/")
    if rest and first.partition(":")[0] in PACKER_NAMES:
        from springtide.scheduling.sharing.packing import Packer
        from springtide.scheduling.sharing.policy import Sharing

        packer = cast(Packer, _make(first, "packer of shares"))
        return Sharing(packer=packer, inner=make_policy(rest, **parameters))
    strategy, slash, training = name.rpartition("/")
    if not slash:
        return cast(Policy, _make(name, "policy", **parameters))
    if "/" in strategy:
        raise InvalidRequest(f"one strategy stands before a policy for training, and {name!r} has several")
    from springtide.scheduling.loans.policy import Loaning
    from springtide.scheduling.loans.pools import Strategy

    return Loaning(
        strategy=cast(Strategy, _make(strategy, "strategy of loans")), training=make_policy(training, **parameters)
    )


def make_live_policy(name: str) -> Policy:
    """The policy of that name as a platform runs it: where it names no packer of shares, with Dilu's.

    Raises InvalidRequest.
    """
    policy = make_policy(name)
    from springtide.scheduling.sharing.policy import Sharing

    return policy if isinstance(policy, Sharing) else Sharing(inner=policy)


def _make(name: str, kind: _Kind, **parameters: Any) -> object:
    plain, _, tail = name.partition(":")
    make = _class_of(plain, kind)
    known = inspect.signature(make).parameters
    for key in (*parameters, *_parse(plain, tail)):
        if key not in known:
            raise InvalidRequest(f"the {kind.split()[0]} {plain} has no parameter {key!r}{_known(known)}")
    kinds = get_type_hints(make)
    written = {key: _convert(plain, key, text, kinds[key]) for key, text in _parse(plain, tail).items()}
    return make(**{**written, **parameters})


def check_policy_name(name: str) -> None:
    """Raise InvalidRequest if there is no such policy, or if it does not take the parameters in its name."""
    make_policy(name)


def describe_policy(name: str) -> str:
    """One line about the policy, the strategy of loans or the packer of shares. Raises InvalidRequest."""
    first, slash, rest = name.partition("/")
    if slash:
        return f"{describe_policy(rest)} {describe_policy(first)}"
    plain = name.partition(":")[0]
    kind: _Kind = "policy"
    if plain in STRATEGY_NAMES or plain in PACKER_NAMES:
        kind = "strategy of loans" if plain in STRATEGY_NAMES else "packer of shares"
    module = inspect.getmodule(_class_of(plain, kind))
    return _ENTRIES[kind][plain].line or ((module and module.__doc__) or "").strip().splitlines()[0]


def _class_of(name: str, kind: _Kind) -> type:
    names = {"policy": POLICY_NAMES, "strategy of loans": STRATEGY_NAMES, "packer of shares": PACKER_NAMES}[kind]
    if name not in names:
        if kind == "policy" and (name in STRATEGY_NAMES or name in PACKER_NAMES):
            what = "strategy of loans" if name in STRATEGY_NAMES else "packer of shares"
            raise InvalidRequest(f"{name} is a {what}: write {name}/POLICY, as in {name}/{names[0]}")
        raise InvalidRequest(f"there is no {kind} {name!r}; choose one of {', '.join(names)}")
    module, _, class_name = _ENTRIES[kind][name].target.partition(":")
    found: type = getattr(importlib.import_module(module), class_name)
    return found


def _parse(name: str, tail: str) -> dict[str, str]:
    """Read `key=value:key=value`."""
    found: dict[str, str] = {}
    for part in tail.split(":") if tail else ():
        key, equals, text = part.partition("=")
        if not (key and equals and text):
            raise InvalidRequest(f"cannot read {part!r} in the policy {name}:{tail}; write {name}:PARAMETER=VALUE")
        found[key] = text
    return found


def _convert(name: str, key: str, text: str, kind: Any) -> Any:
    """A parameter's text as a value of its type."""
    value: Any = {"yes": "true", "no": "false", "none": None}.get(text, text)
    if get_origin(kind) is tuple:
        value = text.split("+")
    try:
        # Not strict: what comes as text may be a number or a truth value.
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the policy {name} does not take {key}={text}: {error}") from error


def _known(parameters: Mapping[str, inspect.Parameter]) -> str:
    if not parameters:
        return "; it has none"
    return "; it has " + ", ".join(f"{key}={parameter.default}" for key, parameter in parameters.items())
