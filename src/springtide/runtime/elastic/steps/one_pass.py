"""One pass over several virtual shards that computes the bits of a pass for each of them.

While user code computes its loss, a mode of torch sees each function it calls. What works sample by sample runs over
all shards at once. What adds up over samples (gradients of parameters, a mean loss) and what draws random numbers is
done for each shard: parameters stand for one tensor a shard, and so does all that is computed of them alone, and each
loss. A pass that does what no rule covers is void and says why; its shards then have a pass each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from springtide.core.reasons import EXACT_OBSTACLES
from springtide.runtime.data.shards import seeds_of
from springtide.runtime.elastic.reduce import Block
from springtide.runtime.elastic.steps.linear_by_shard import LayerUse, LinearByShard, ways_of

_READS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__array__",
        "__contains__",
    ]
)
_CHOOSES = frozenset(["masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"])
_DRAWS = frozenset(
    [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "bernoulli",
        "rand_like",
        "randn_like",
        "randint_like",
        "scaled_dot_product_attention",
    ]
)
_CREATES = frozenset(("rand", "randn"))
_REDUCES = frozenset(("mean", "sum"))
_LOSSES = frozenset(["cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"])


class _NoRuleError(Exception):
    """No rule covers what user code does; the text says what that is, and `code` is one of EXACT_OBSTACLES."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class Pass:
    """One pass over the shards of `block`, `num_samples` in all.

    `reason` is why it is void, `code` the same as one of EXACT_OBSTACLES. `shapes` are those of what the rules were
    applied to, in order: what was checked for some holds for the same ones.
    """

    step: int
    block: Block
    num_samples: int
    reason: str = ""
    code: str = ""
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    # By the id of a parameter: a tensor for each shard, and how often it is used.
    own: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    # By the id of a tensor, which is kept: what it is for each shard.
    parts: dict[int, tuple[torch.Tensor, list[Any]]] = field(default_factory=dict)
    layers: list[tuple[int, LayerUse]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    def void(self, code: str, reason: str) -> None:
        """It does not count, for this reason, unless there is one already."""
        if not self.reason:
            self.code, self.reason = code, reason

    def is_batch(self, value: Any) -> bool:
        """Whether its first dimension is one of samples, or of samples and something in them."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) > 0 == len(value) % self.num_samples

    def split(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of the shards."""
        return torch.split(value, len(value) // self.block.size)

    def joined(self, results: Sequence[Any], *, has_samples: bool) -> Any:
        """What a function returned for each shard, as one value."""
        first = results[0]
        if isinstance(first, tuple | list):
            columns = zip(*results, strict=True)
            return type(first)([self.joined(column, has_samples=has_samples) for column in columns])
        if not isinstance(first, torch.Tensor):
            return first
        if has_samples and first.dim():
            if len(first) == 0 or len(first) % (self.num_samples // self.block.size):
                raise _NoRuleError("rule", "its result has another number of rows than its input has samples")
            return torch.cat(list(results))
        is_mean = first.dim() == 0 and first.is_floating_point()
        whole = torch.stack(list(results)).mean() if is_mean else first.view_as(first)
        self.parts[id(whole)] = whole, list(results)
        return whole

    def of_loss(self, loss: torch.Tensor) -> list[torch.Tensor] | None:
        """The losses of the shards; None if this was not computed by rules."""
        found = self.parts.get(id(loss))
        return None if found is None else found[1]

    def leaves(self, parameter: torch.Tensor) -> list[torch.Tensor | None] | None:
        """After the backward pass the gradients of the shards; None if their sum was written where it is to go."""
        if any(place == id(parameter) and layer.is_added for place, layer in self.layers):
            return None
        own = self.own.get(id(parameter), [None] * self.block.size)
        return [None if leaf is None else leaf.grad for leaf in own]


class OnePass(TorchFunctionMode):
    """Applies the rules to what user code calls between `begin` and `end`."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], seed: int) -> None:
        """`seed` is the job's, from which each shard's random numbers follow."""
        super().__init__()
        self._names = {id(parameter): name for name, parameter in zip(names, parameters, strict=True)}
        self._seed = seed
        self._pass: Pass | None = None
        self._is_entered = False

    def begin(self, step: int, block: Block, num_samples: int) -> None:
        """Apply the rules from here on."""
        self._pass = Pass(step, block, num_samples)
        if not self._is_entered:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def end(self) -> Pass | None:
        """Apply no rules any more; returns the pass, None if there is none."""
        found, self._pass = self._pass, None
        # A mode that user code has entered since then comes first; without a pass this one does nothing.
        if self._is_entered and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)
            self._is_entered = False
        if found is not None and not found.reason and not self._has_drawn_by_rules(found):
            found.void("random", EXACT_OBSTACLES["random"])
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        now = self._pass
        if now is None or now.reason:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        try:
            return self._call(now, func, name, args, kwargs)
        except _NoRuleError as error:
            now.void(error.code, str(error))
        except Exception as error:
            now.void("rule", f"{name} cannot be computed shard by shard: {error!s:.200}")
        return func(*args, **kwargs)

    def _call(self, now: Pass, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        _refuse(name, args, kwargs)
        if name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
            known = [self._names[id(value)] for value in _values(args, kwargs) if id(value) in self._names]
            where = f" ({known[0].rpartition('.')[0]})" if known else ""
            raise _NoRuleError("batch_norm", f"BatchNorm{where} mixes the samples of a batch")
        if name in _CREATES:
            return self._created(now, func, args, kwargs)
        if name in _DRAWS and _draws(name, args, kwargs):
            return self._by_shard(now, func, name, args, kwargs, draws=True)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is functional.linear and (layer := self._linear(now, *args, **kwargs)) is not None:
            return layer
        is_loss = name in _LOSSES or name.endswith("_loss") or (name in _REDUCES and len(args) == 1 and not kwargs)
        if is_loss or any(self._is_shared(now, value) for value in _values(args, kwargs)):
            return self._by_shard(now, func, name, args, kwargs)
        return func(*args, **kwargs)

    def _is_shared(self, now: Pass, value: Any) -> bool:
        """Whether it is a parameter, or was computed of parameters alone, or is a loss."""
        return id(value) in self._names or id(value) in now.parts

    def _of_shards(self, now: Pass, value: Any) -> Sequence[Any]:
        if id(value) in self._names:
            now.uses[id(value)] += 1
            if id(value) not in now.own:
                now.own[id(value)] = [value.detach().requires_grad_() for _ in range(now.block.size)]
            return now.own[id(value)]
        if id(value) in now.parts:
            return now.parts[id(value)][1]
        return now.split(value) if now.is_batch(value) else [value] * now.block.size

    def _by_shard(self, now: Pass, func: Any, name: str, args: Any, kwargs: Any, *, draws: bool = False) -> Any:
        """Call a function for each shard."""
        leaves, spec = tree_flatten((args, kwargs))
        has_samples = any(now.is_batch(leaf) and not self._is_shared(now, leaf) for leaf in leaves)
        if draws and not has_samples:
            return func(*args, **kwargs)
        now.shapes.append((name, *(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))))
        columns = [self._of_shards(now, leaf) for leaf in leaves]

        def call(shard: int) -> Any:
            own_args, own_kwargs = tree_unflatten([column[shard] for column in columns], spec)
            return func(*own_args, **own_kwargs)

        results = self._drawn(now, call) if draws else [call(shard) for shard in range(now.block.size)]
        return now.joined(results, has_samples=has_samples)

    def _drawn(self, now: Pass, call: Callable[[int], Any]) -> list[Any]:
        """Call a function for each shard with the random numbers of that shard."""
        if not now.states:
            for shard in range(now.block.start, now.block.start + now.block.size):
                seed = seeds_of(self._seed, now.step, shard)[0]
                now.states.append(torch.Generator().manual_seed(seed).get_state())
        kept, results = torch.get_rng_state(), []
        for shard, state in enumerate(now.states):
            torch.set_rng_state(state)
            results.append(call(shard))
            now.states[shard] = torch.get_rng_state()
        torch.set_rng_state(kept)
        return results

    def _created(self, now: Pass, func: Any, args: Any, kwargs: Any) -> Any:
        """Random numbers for each sample."""
        sizes = tuple(args[0]) if args and isinstance(args[0], tuple | list) else args
        is_plain = sizes and all(isinstance(size, int) for size in sizes) and kwargs.get("generator") is None
        if not is_plain or sizes[0] % now.num_samples or not sizes[0]:
            return func(*args, **kwargs)
        own = (sizes[0] // now.block.size, *sizes[1:])
        return torch.cat(self._drawn(now, lambda _: func(own, **kwargs)))

    def _has_drawn_by_rules(self, now: Pass) -> bool:
        """Whether the generators are as they were when the pass began: rules leave them as they are."""
        of_torch, of_numpy, of_python = seeds_of(self._seed, now.step, now.block.start)
        legacy: Any = np.random.RandomState(of_numpy & 0xFFFFFFFF).get_state()
        found: Any = np.random.get_state()  # noqa: NPY002 - user code draws from numpy's global generator.
        return (
            torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(of_torch).get_state())
            and bool((found[1] == legacy[1]).all())
            and found[2:] == legacy[2:]
            and random.getstate() == random.Random(of_python).getstate()
        )

    def _linear(
        self, now: Pass, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """A layer whose weight and bias are parameters, by the rule for it; None if it does not apply."""
        is_plain = id(weight) in self._names and (bias is None or id(bias) in self._names)
        if not is_plain or not now.is_batch(input) or self._is_shared(now, input) or torch.is_autocast_enabled("cpu"):
            return None
        num_shards, (outputs, inputs) = now.block.size, weight.shape
        rows = input.numel() // inputs // num_shards
        now.shapes.append(("linear", tuple(input.shape), outputs))
        shape = (num_shards, rows, inputs, outputs)
        ways = ways_of(shape, weight.dtype, bias is not None, torch.get_num_threads())
        layer = LayerUse(num_shards, ways, weight.dtype)
        now.layers.append((id(weight), layer))
        shared = [*self._of_shards(now, weight), *(() if bias is None else self._of_shards(now, bias))]
        out: torch.Tensor = LinearByShard.apply(input, layer, *shared)  # type: ignore[no-untyped-call]
        return out


def _values(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


def _refuse(name: str, args: Any, kwargs: Any) -> None:
    if name in _READS:
        raise _NoRuleError("read", f"values of a tensor are read ({name}) before ctx.step")
    is_mask = False
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_mask = any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if is_mask or name in _CHOOSES or (name == "where" and len(args) + len(kwargs) == 1):
        how = "a mask" if is_mask else name
        raise _NoRuleError("chosen", f"samples are chosen by their values ({how})")


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    """Whether this call draws random numbers from the global generator."""
    if kwargs.get("generator") is not None:
        return False
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return "dropout" not in name or bool(kwargs.get("training", args[2] if len(args) > 2 else True))
