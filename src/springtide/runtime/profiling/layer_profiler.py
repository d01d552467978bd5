"""Profiling a model layer by layer (FuncPipe, sections 3.1 and 3.4.2): the time, memory and output size of each layer.

Layers run one at a time on one micro-batch and one thread, so that memory holds no more than the model and the data of
its largest layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from springtide.core.errors import InvalidRequest
from springtide.core.functions import LayerProfile, ModelProfile
from springtide.runtime.models.layers import Layer, borders, has_gradient
from springtide.runtime.profiling.place import BYTES_PER_S, Clock, Transfer, fixed_part_s, status_bytes

_HOW_TO_DECLARE = "its pipeline_layers() must be modules whose composition is the model's forward"


def profile_layers(
    layers: Sequence[Layer],
    x: Any,
    y: Any,
    loss: Callable[[Any, Any], Tensor],
    *,
    name: str,
    micro_batch_size: int,
    num_rounds: int = 5,
    memory_mb: int,
    bytes_per_s: float = BYTES_PER_S,
    latency_s: float = 0.04,
    base_bytes: int = 0,
    clock: Clock = time.perf_counter,
    transfer: Transfer | None = None,
    larger: tuple[Any, Any, int] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ModelProfile:
    """Measure time and memory of each layer on the micro-batch (x, y): medians of `num_rounds` rounds after a warm-up.

    The last layer's times include the loss. `clock` returns seconds: wall-clock time on a function, which then includes
    its limited CPU share, or `time.process_time` on a machine with other load. `transfer` returns a context in which
    data moves at the link's speed: every second round runs in it, which gives the slowdown beta (with CPU time: one
    core doing both); without it the slowdown is 1. `base_bytes` is the process's memory before the model was built.
    `larger` is a second batch (x, y, size), from whose time follows the part of a pass that does not grow with its
    samples. Changes only buffers, such as running means. Raises InvalidRequest, which names the layer at fault.
    """
    if num_rounds < 1 or micro_batch_size < 1:
        raise InvalidRequest("a profile takes at least one round of a micro-batch of at least one sample")
    sizes = _measure_bytes(layers, x, y, loss)
    quiet, slowdown = _rounds(layers, x, y, loss, num_rounds, clock, transfer, on_progress)
    profiles = [
        LayerProfile(
            name=layer.name,
            parameter_bytes=size["parameter_bytes"],
            activation_bytes=size["activation_bytes"],
            output_bytes=size["output_bytes"],
            gradient_bytes=size["gradient_bytes"],
            forward_s=(statistics.median(times[place][0] for times in quiet),),
            backward_s=(statistics.median(times[place][1] for times in quiet),),
        )
        for place, (layer, size) in enumerate(zip(layers, sizes, strict=True))
    ]
    # Before the larger batch, whose memory must not count.
    base_bytes = max(base_bytes, _scratch_bytes(profiles, layers))
    fixed_s = 0.0
    if larger is not None:
        on_progress(f"a batch of {larger[2]}")
        larger_s = [
            sum(map(sum, _time_round(layers, larger[0], larger[1], loss, clock))) for _ in range(min(num_rounds, 3) + 1)
        ]
        smaller_s = statistics.median(sum(map(sum, times)) for times in quiet)
        fixed_s = fixed_part_s(micro_batch_size, smaller_s, larger[2], statistics.median(larger_s[1:]))
    return ModelProfile(
        model=name,
        micro_batch_size=micro_batch_size,
        memory_mb=(memory_mb,),
        bytes_per_s=(bytes_per_s,),
        layers=tuple(profiles),
        latency_s=latency_s,
        slowdown=slowdown,
        base_bytes=base_bytes,
        fixed_s=fixed_s,
        source=f"measured: medians of {num_rounds} rounds, {torch.get_num_threads()} thread"
        f"{'' if torch.get_num_threads() == 1 else 's'}, torch {torch.__version__}",
    )


def _rounds(
    layers: Sequence[Layer],
    x: Any,
    y: Any,
    loss: Callable[[Any, Any], Tensor],
    num_rounds: int,
    clock: Clock,
    transfer: Transfer | None,
    on_progress: Callable[[str], None],
) -> tuple[list[list[tuple[float, float]]], float]:
    """The times of each layer in each round but the first, and the factor by which transfers slow a round."""
    quiet: list[list[tuple[float, float]]] = []
    alone_s, beside_s = [], []
    for index in range(num_rounds + 1):
        on_progress(f"round {index + 1} of {num_rounds + 1}")
        began_s = clock()
        times = _time_round(layers, x, y, loss, clock)
        middle_s = clock()
        if transfer is not None:
            with transfer():
                _time_round(layers, x, y, loss, clock)
        if index > 0:
            quiet.append(times)
            alone_s.append(middle_s - began_s)
            beside_s.append(clock() - middle_s)
    if transfer is None:
        return quiet, 1.0
    return quiet, max(1.0, statistics.median(beside_s) / statistics.median(alone_s))


def _measure_bytes(layers: Sequence[Layer], x: Any, y: Any, loss: Callable[[Any, Any], Tensor]) -> list[dict[str, int]]:
    """Bytes of each layer: parameters, tensors saved for its backward pass, output, gradient of its input.

    A tensor that two neighbouring layers save counts for both, so that the sum is an upper bound for any stage.
    """
    found = []
    value = x
    for place, layer in enumerate(layers):
        inputs = _leaves(value, wants_grad=place > 0)
        held = [*layer.module.parameters(), *layer.module.buffers()]
        own = {tensor.untyped_storage().data_ptr() for tensor in held}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            # Detached, because an output that refers to its graph would form a cycle and never be freed.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = _call(layer, inputs)
            heads = [_loss_of(loss, outputs, y)] if place == len(layers) - 1 else []
        found.append(
            {
                "parameter_bytes": sum(parameter.nbytes for parameter in layer.module.parameters()),
                "activation_bytes": sum(kept.values()),
                "output_bytes": sum(tensor.nbytes for tensor in _tensors(outputs)),
                "gradient_bytes": sum(tensor.nbytes for tensor in _tensors(inputs) if tensor.requires_grad),
            }
        )
        value = _leaves(outputs, wants_grad=False)
        del inputs, outputs, heads
    return found


def _time_round(
    layers: Sequence[Layer], x: Any, y: Any, loss: Callable[[Any, Any], Tensor], clock: Clock
) -> list[tuple[float, float]]:
    """Forward and backward seconds of each layer; gradients are added to existing ones, as in later micro-batches."""
    found = []
    value = x
    for place, layer in enumerate(layers):
        inputs = _leaves(value, wants_grad=place > 0)
        for parameter in layer.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        began_s = clock()
        outputs = _call(layer, inputs)
        heads = [_loss_of(loss, outputs, y)] if place == len(layers) - 1 else _tensors(outputs)
        forward_s = clock() - began_s
        heads = [head for head in heads if head.requires_grad]
        gradients = [torch.full_like(head, 1e-3) for head in heads]
        began_s = clock()
        if heads:
            torch.autograd.backward(heads, gradients)
        found.append((forward_s, clock() - began_s))
        value = _leaves(outputs, wants_grad=False)
        for parameter in layer.module.parameters():
            parameter.grad = None
    return found


def _call(layer: Layer, inputs: Any) -> Any:
    starts_in_place = any(getattr(module, "inplace", False) for module in layer.module.modules())
    try:
        # A copy, because autograd forbids in-place changes of a leaf that requires a gradient.
        outputs = layer.module(_copied(inputs) if starts_in_place else inputs)
    except InvalidRequest:
        raise
    # The layer is user code, so any exception is reported with its name.
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:300]
        raise InvalidRequest(
            f"layer {layer.name} does not take what the layer before it gives ({type(error).__name__}: {text}); "
            f"{_HOW_TO_DECLARE}"
        ) from None
    borders(outputs, f"layer {layer.name}")
    return outputs


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else tuple(_copied(part) for part in value)


def _loss_of(loss: Callable[[Any, Any], Tensor], outputs: Any, y: Any) -> Tensor:
    found = loss(outputs, y)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise InvalidRequest("the loss must be a tensor with one element, the mean over the samples")
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _leaves(value: Any, *, wants_grad: bool) -> Any:
    """The tensors as a stage reads them from the store: leaves without history, which may collect a gradient."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(wants_grad and has_gradient(value))
    if isinstance(value, tuple | list):
        return tuple(_leaves(part, wants_grad=wants_grad) for part in value)
    return value


def _scratch_bytes(profiles: Sequence[LayerProfile], layers: Sequence[Layer]) -> int:
    """The process's peak memory, less that of the model and its largest layer."""
    buffers = sum(buffer.nbytes for layer in layers for buffer in layer.module.buffers())
    parameters = sum(layer.parameter_bytes for layer in profiles)
    largest = max(layer.parameter_bytes + layer.activation_bytes + layer.output_bytes for layer in profiles)
    return status_bytes("VmHWM") - parameters - buffers - largest
