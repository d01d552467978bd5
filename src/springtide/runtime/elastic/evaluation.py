"""One pass over a dataset, divided between the members of a group that ask for it after the same step.

No collective takes part in it, because not every member need ask: a joiner has that place of the user's code behind it.
Members claim one part after the other in the group's store and put the results there. A member that waits for the
others in the exchange of the next step sees there that the evaluation gets further. The parts do not depend on the
number of members, and their results are added in their order.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import torch

from springtide.core.context import Batch
from springtide.core.decoding import msgpack_decoder
from springtide.core.errors import CollectiveError, InvalidRequest, PeerLost
from springtide.runtime.data.batch_loader import PartIds, kept_random_state
from springtide.runtime.data.batch_source import BatchSource
from springtide.runtime.data.dataset_reader import SampleReader
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.elastic.group import EVALUATION_PATIENCE_S, Group

_POLL_S = 0.005


class PartScores(msgspec.Struct, frozen=True, array_like=True):
    """The means over one part, and what the part counts for: its samples, or the weight that the user gave."""

    weight: float
    means: dict[str, float]


# Gets the numbers of parts one by one, and yields each with its scores.
Compute = Callable[[Iterator[int]], Iterator[tuple[int, PartScores]]]
_DECODER = msgpack_decoder(PartScores)


class Evaluation:
    """Parts of a dataset as batches for the user's function, with the model in evaluation mode."""

    def __init__(
        self, model: torch.nn.Module, device: torch.device, seed: int, source: BatchSource, size: int, step: int
    ) -> None:
        """Parts have `size` samples, and are taken in the order of the source."""
        self._model = model
        self._device = device
        self._seed = seed
        self._source = source
        self._size = size
        self._step = step
        order, num_samples = source.order, source.num_samples
        # A named dataset is read as it is stored, shard by shard.
        is_plain = order is None or isinstance(order, SampleReader)
        self._ids = np.arange(num_samples) if order is None or is_plain else order.order(seed, 0)

    @property
    def num_parts(self) -> int:
        return -(-len(self._ids) // self._size)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Without gradients and in evaluation mode; modes of modules and random generators are as before afterwards."""
        modes = [(module, module.training) for module in self._model.modules()]
        devices = [self._device] if self._device.type == "cuda" else []
        with kept_random_state(), torch.random.fork_rng(devices=devices), torch.no_grad():
            self._model.eval()
            try:
                yield
            finally:
                for module, mode in modes:
                    module.training = mode

    def compute(
        self, numbers: Iterator[int], function: Callable[[Batch], Any], make: Callable[[Any, PartIds, int, int], Batch]
    ) -> Iterator[tuple[int, PartScores]]:
        """The scores of these parts. Raises InvalidRequest for what is no score, and what the function raises."""
        taken: deque[tuple[int, PartIds]] = deque()

        def ahead() -> Iterator[PartIds]:
            for number in numbers:
                ids = tuple(self._ids[number * self._size : (number + 1) * self._size].tolist())
                taken.append((number, PartIds(0, ids)))
                yield taken[-1][1]

        for data in self._source.fetch_all(ahead()):
            number, part = taken.popleft()
            seed_everything(self._seed, self._step, number)
            yield number, scores_of(function(make(data, part, self._step, number)), len(part.ids))


def scores_of(returned: Any, num_samples: int) -> PartScores:
    """What a user's function returned for a batch. Raises InvalidRequest."""
    means, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, num_samples)
    if not isinstance(means, Mapping) or not means:
        raise InvalidRequest(
            "the function of ctx.evaluate() must return a dict of means over its batch, as in "
            f'{{"loss": ...}}, or a pair of a dict and a weight; it returned a {type(returned).__name__}'
        )
    try:
        scores = PartScores(float(weight), {str(name): float(value) for name, value in means.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"the function of ctx.evaluate() must return single numbers: {error}") from error
    if not (math.isfinite(scores.weight) and scores.weight >= 0.0):
        raise InvalidRequest(f"the weight of a batch must be a number of at least 0, not {weight}")
    return scores


class Evaluations:
    """Counts the evaluations that user code asks for at one moment, so that all members give one the same name."""

    def __init__(self) -> None:
        self._moment = (0, 0)
        self._counts: Counter[str] = Counter()

    def name_of(self, generation: int, step: int, name: str) -> str:
        """The name of the next evaluation of this kind after `step`: a second one at one moment is another one."""
        if self._moment != (generation, step):
            self._moment, self._counts = (generation, step), Counter()
        number = self._counts[name]
        self._counts[name] += 1
        return f"{step}/{number}/{name}"


def scores_of_all(
    group: Group | None,
    name: str,
    num_parts: int,
    compute: Compute,
    look: Callable[[], None],
    is_broken: Callable[[], bool],
) -> list[PartScores]:
    """The scores of all parts, in order; with the other members while they are there, else alone.

    The arguments are those of `compute_shared`. What is missing when a member was lost is computed here.
    """
    known: dict[int, PartScores] = {}
    if group is not None and group.world_size > 1:
        with suppress(CollectiveError):
            compute_shared(group, name, num_parts, known, compute, look, is_broken)
    compute_alone(num_parts, known, compute, look)
    return [known[number] for number in range(num_parts)]


def compute_alone(num_parts: int, known: dict[int, PartScores], compute: Compute, look: Callable[[], None]) -> None:
    """Compute the parts that are not in `known`, and add them to it. `look` is called after each."""
    for number, scores in compute(number for number in range(num_parts) if number not in known):
        known[number] = scores
        look()


def compute_shared(
    group: Group,
    name: str,
    num_parts: int,
    known: dict[int, PartScores],
    compute: Compute,
    look: Callable[[], None],
    is_broken: Callable[[], bool],
) -> None:
    """Compute parts with the other members, until all are in `known`, or it is of no use to wait for them.

    `name` is the same on all members that evaluate the same. `look` is called again and again, and `is_broken` says
    that a member was lost. Raises CollectiveError if the store is gone or the others get no further.
    """
    store, prefix = group.store, f"evaluation/{name}/"

    def publish(number: int, scores: PartScores) -> None:
        known[number] = scores
        with _gone():
            # As text: stores of torch take no other values.
            store.set(f"{prefix}{number}", msgspec.msgpack.encode(scores).hex())
        group.note_evaluation()

    def claimed() -> Iterator[int]:
        while True:
            with _gone():
                number = store.add(f"{prefix}next", 1) - 1
            if number >= num_parts:
                return
            group.note_evaluation()
            yield number

    group.note_evaluation()
    for number, scores in compute(claimed()):
        publish(number, scores)
        look()
    deadline_s = time.monotonic() + EVALUATION_PATIENCE_S
    for number in range(num_parts):
        while number not in known:
            with _gone():
                if store.check([f"{prefix}{number}"]):
                    known[number] = _DECODER.decode(bytes.fromhex(store.get(f"{prefix}{number}").decode()))
                    break
            look()
            if is_broken():
                return
            if group.is_evaluating():
                deadline_s = time.monotonic() + EVALUATION_PATIENCE_S
            elif time.monotonic() > deadline_s:
                raise PeerLost(f"the evaluation got no further for {EVALUATION_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the meeting place is gone: {error}") from error


def weighted_means(parts: list[PartScores]) -> dict[str, float]:
    """The means over all parts. Raises InvalidRequest if the parts have other names, or count for nothing."""
    names = parts[0].means.keys()
    if any(part.means.keys() != names for part in parts):
        raise InvalidRequest("the function of ctx.evaluate() must return the same names for every batch")
    total = sum(part.weight for part in parts)
    if not total > 0:
        raise InvalidRequest("the weights that the function of ctx.evaluate() returned add up to nothing")
    return {name: sum(part.means[name] * part.weight for part in parts if part.weight) / total for name in names}
