"""The registry of policies, strategies of loans and packers of shares: the one module that knows them by name."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, cast, get_origin, get_type_hints

import msgspec

from springtide.core.decision import Policy
from springtide.core.decoding import convert
from springtide.core.errors import InvalidRequest
from springtide.core.plugins import load_from_studies, offered

# In place of a class: springtide-studies provides it, under the same name in the entry point group of its kind.
OF_STUDIES = ""
# Where each class is, "package.module:Class". Modules are imported on demand, so that a control plane loads only the
# policy that it runs. Entry points of other distributions in the groups come after these.
_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "springtide": "springtide.scheduling.policies.springtide.policy:Springtide",
        "elastic": "springtide.scheduling.policies.elastic:Elastic",
        "edf": "springtide.scheduling.policies.edf:EarliestDeadlineFirst",
        "fifo": "springtide.scheduling.policies.fifo:Fifo",
        "elasticflow": OF_STUDIES,
        "elasticflow-artifact": OF_STUDIES,
        "edf+admission": OF_STUDIES,
        "edf+elastic": OF_STUDIES,
        "fapes": "springtide.scheduling.policies.fapes.policy:Fapes",
        "goodput": "springtide.scheduling.policies.goodput.policy:Goodput",
        "pollux": OF_STUDIES,
        "sia": OF_STUDIES,
        "chronus": OF_STUDIES,
        "gandiva": OF_STUDIES,
        "optimus": OF_STUDIES,
        "sjf": OF_STUDIES,
        "static": OF_STUDIES,
        "themis": OF_STUDIES,
        "tiresias": OF_STUDIES,
        "optimus-oracle": OF_STUDIES,
        "tiresias-tuned": OF_STUDIES,
    }
)
# Which servers serve and which train; each is written before a policy for training, as in `two-way/fapes`.
_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "tide": "springtide.scheduling.loans.tide:TideStrategy",
        "two-way": "springtide.scheduling.loans.reclaim:TwoWay",
        "one-way": "springtide.scheduling.loans.reclaim:OneWay",
        "dedicated": "springtide.scheduling.loans.reclaim:Dedicated",
    }
)
# Which shares are put together on one device; each is written before any policy, as in `dilu/springtide`.
_PACKERS: Mapping[str, str] = MappingProxyType(
    {
        "dilu": "springtide.scheduling.sharing.packing:DiluPacker",
        "infless-l": OF_STUDIES,
        "infless-r": OF_STUDIES,
        "fast-gs": OF_STUDIES,
        "exclusive": OF_STUDIES,
    }
)
_Kind = Literal["policy", "strategy of loans", "packer of shares"]
_KNOWN: Mapping[_Kind, Mapping[str, str]] = MappingProxyType(
    {"policy": _POLICIES, "strategy of loans": _STRATEGIES, "packer of shares": _PACKERS}
)
_GROUPS: Mapping[_Kind, str] = MappingProxyType(
    {
        "policy": "springtide.policies",
        "strategy of loans": "springtide.strategies",
        "packer of shares": "springtide.packers",
    }
)


def _installed(kind: _Kind) -> tuple[str, ...]:
    known, others = _KNOWN[kind], offered(_GROUPS[kind])
    return (
        *(name for name, target in known.items() if target != OF_STUDIES or name in others),
        *(name for name in others if name not in known),
    )


POLICY_NAMES: tuple[str, ...] = _installed("policy")
STRATEGY_NAMES: tuple[str, ...] = _installed("strategy of loans")
PACKER_NAMES: tuple[str, ...] = _installed("packer of shares")
_ALL_NAMES = frozenset({*_POLICIES, *_STRATEGIES, *_PACKERS, *POLICY_NAMES, *STRATEGY_NAMES, *PACKER_NAMES})


def make_policy(name: str, **parameters: Any) -> Policy:
    """Build the policy of that name; what is not in `parameters` keeps its default.

    The name may carry parameters itself, as in `edf:caps=no` or `tiresias:thresholds_s=3250+7200:promotion_factor=8`:
    numbers, names, yes or no, and `+` between the items of a list. `STRATEGY/TRAINING`, as in `two-way/fapes:unit=1`,
    is a policy for training under a strategy of loans; `parameters` are those of the training policy. `PACKER/...`,
    as in `dilu/springtide`, is any policy beside a packer of shares.
    Raises InvalidRequest naming the known policies, or the parameters of this one.
    """
    first, rest = _split(name)
    if not rest:
        return cast(Policy, _make(first, "policy", **parameters))
    inner = make_policy(rest, **parameters)
    if first.partition(":")[0] in {*_PACKERS, *PACKER_NAMES}:
        from springtide.scheduling.sharing.packing import Packer
        from springtide.scheduling.sharing.policy import Sharing

        return Sharing(packer=cast(Packer, _make(first, "packer of shares")), inner=inner)
    if _split(rest)[1]:
        raise InvalidRequest(f"one strategy stands before a policy for training, and {name!r} has several")
    from springtide.scheduling.loans.policy import Loaning
    from springtide.scheduling.loans.pools import Strategy

    return Loaning(strategy=cast(Strategy, _make(first, "strategy of loans")), training=inner)


def _split(name: str) -> tuple[str, str]:
    """What stands before the first `/`, and the rest; the value of a parameter, as a path, may hold slashes too."""
    first, slash, rest = name.partition("/")
    while slash and "=" in first.rpartition(":")[2] and re.split("[:/]", rest)[0] not in _ALL_NAMES:
        more, slash, rest = rest.partition("/")
        first += f"/{more}"
    return first, rest


def make_live_policy(name: str) -> Policy:
    """The policy of that name as a platform runs it: with Dilu's packer of shares if the name has none.

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
    """One line about the policy, the strategy of loans or the packer of shares. Raises InvalidRequest.

    It is the `summary` of its class, else the first line of its module.
    """
    first, rest = _split(name)
    if rest:
        return f"{describe_policy(rest)} {describe_policy(first)}"
    plain = name.partition(":")[0]
    kind: _Kind = "policy"
    if plain in STRATEGY_NAMES or plain in PACKER_NAMES:
        kind = "strategy of loans" if plain in STRATEGY_NAMES else "packer of shares"
    found = _class_of(plain, kind)
    module = inspect.getmodule(found)
    return getattr(found, "summary", "") or ((module and module.__doc__) or "").strip().splitlines()[0]


def _class_of(name: str, kind: _Kind) -> type:
    names = {"policy": POLICY_NAMES, "strategy of loans": STRATEGY_NAMES, "packer of shares": PACKER_NAMES}[kind]
    target = _KNOWN[kind].get(name)
    if target is None and name not in names:
        if kind == "policy" and (name in STRATEGY_NAMES or name in PACKER_NAMES):
            what = "strategy of loans" if name in STRATEGY_NAMES else "packer of shares"
            raise InvalidRequest(f"{name} is a {what}: write {name}/POLICY, as in {name}/{names[0]}")
        raise InvalidRequest(f"there is no {kind} {name!r}; choose one of {', '.join(names)}")
    if not target:
        offer: type = load_from_studies(_GROUPS[kind], name, f"the {kind} {name}")
        return offer
    module, _, class_name = target.partition(":")
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
        return convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the policy {name} does not take {key}={text}: {error}") from error
    except TypeError as error:
        raise InvalidRequest(f"the policy {name} takes {key} from Python only, not in its name") from error


def _known(parameters: Mapping[str, inspect.Parameter]) -> str:
    if not parameters:
        return "; it has none"
    return "; it has " + ", ".join(f"{key}={parameter.default}" for key, parameter in parameters.items())
