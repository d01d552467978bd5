"""What happens to summed gradients before the update: a GradScaler's factor is taken out, and they are clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.steps.method import Reduced
from springtide.runtime.models.named_tensors import TrainingState


class LossScaling:
    """The GradScaler among the prepared objects; without one, nothing is scaled or skipped.

    Scaled gradients are exchanged, so that all members find the same infinities in their sum and skip the same updates.
    """

    def __init__(self, state: TrainingState) -> None:
        """Raises InvalidRequest for more than one GradScaler."""
        scalers = state.objects.scalers
        if len(scalers) > 1:
            raise InvalidRequest(f"ctx.prepare() got {len(scalers)} GradScalers; one scales the loss of a model")
        self._optimizers = state.optimizers
        self._scaler = scalers[0] if scalers and scalers[0].is_enabled() else None
        # Whether the sums have an infinity or a NaN, so that the optimizer takes no step.
        self.is_skipped = False

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the present scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, reduced: Reduced, place: int = 0) -> Reduced:
        """Divide the gradients of an optimizer by the scale; returns `reduced` with its squares divided, too."""
        if self._scaler is None:
            return reduced
        scale = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizers[place])
        found = self._scaler._found_inf_per_device(self._optimizers[place]).values()
        self.is_skipped = any(float(value) > 0.0 for value in found)
        if reduced.squares is None:
            return reduced
        shard_square, mean_square = reduced.squares
        return replace(reduced, squares=(shard_square / scale / scale, mean_square / scale / scale))

    def updated(self, place: int = 0) -> None:
        """Set the next scale, once the optimizer's update was made or skipped."""
        # The scaler refuses to go on from a step in which no parameter had a gradient.
        if self._scaler is not None and self._scaler._found_inf_per_device(self._optimizers[place]):
            self._scaler.update()
        self.is_skipped = False

    def discard(self) -> None:
        """Forget that gradients were divided: the step is done again."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()
        self.is_skipped = False


def weighted(
    loss: torch.Tensor, root: torch.Tensor, weight: float | None, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and root of a part that is to count for `weight` and would count for its samples (None: as it would)."""
    if weight is None:
        return loss, root
    if weight == 0.0:
        # A mean over nothing is NaN, which would stay one times zero.
        nothing = torch.zeros_like(loss, requires_grad=True)
        return nothing, nothing
    return loss.detach() * (weight / num_samples), root * (weight / num_samples)


def divided_by_weight(reduced: Reduced, parameters: Sequence[torch.Tensor], num_samples: int) -> Reduced:
    """Divide the summed gradients, loss and squares by what all parts count for, if that is not their samples.

    A batch that counts for nothing has gradients of zero.
    """
    relative = reduced.flags.weight / num_samples
    if relative in (0.0, 1.0):
        return reduced
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(relative)
    squares = None if reduced.squares is None else tuple(square / relative / relative for square in reduced.squares)
    return replace(reduced, loss=reduced.loss / relative, squares=squares)  # type: ignore[arg-type]


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, group: Group | None) -> float:
    """Scale gradients down to `max_norm` as torch does, alike on every member; returns the norm that they had.

    Raises CollectiveError.
    """
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if group is not None and group.world_size > 1 and not group.is_local:
        # Another model of processor may add the squares in another order.
        group.broadcast(norm, 0)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
