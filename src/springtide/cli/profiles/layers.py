"""`springtide profile FILE --layers`: measures each layer of a task's model, and prints the profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from springtide.cli.loading import as_typed, find_training, import_file, split_target, uses_springtide
from springtide.cli.session import Session, refuse
from springtide.cli.tables.columns import align
from springtide.core.workload import Entrypoint

if TYPE_CHECKING:
    from springtide.core.functions import LayerProfile
    from springtide.runtime.profiling.layer_profiling import LayerProfileFile

MICRO_BATCH_SIZE = 4
# Of a longer model only the most expensive layers are shown; the file has them all.
_MAX_ROWS = 40
_MIB = 1 << 20


def profile_layers(
    session: Session, target: str, out: str | None, limit_s: float | None, micro_batch_size: int | None, seed: int
) -> None:
    """Measure the layers of FILE's task, write the profile and print it. Raises InvalidRequest, BackendError."""
    from springtide.client.functions import Task
    from springtide.runtime.profiling.layer_profiling import (
        DEADLINE_S,
        NUM_ROUNDS,
        profile_source_layers,
        write_layer_profile,
    )

    path, object_name = split_target(target)
    found = find_training(import_file(path), path, object_name) if uses_springtide(path) else None
    if not isinstance(found, Task):
        what = "a training function" if found is not None else "no task"
        refuse(
            f"{path.name} has {what}: only the model of a declared st.Task can be cut into layers; write "
            "task = st.Task(model=..., dataset=..., loss=..., optimizer=...)"
        )
    chosen = Path(out or f"{path.stem}.layers.json")
    if not chosen.absolute().parent.is_dir():
        refuse(f"{chosen} cannot be written: there is no folder {chosen.parent}")
    source = found.source()
    measured = profile_source_layers(
        Entrypoint(source_path=str(path), object_name=source.object_name, import_root=source.import_root),
        name=found.name or path.stem,
        micro_batch_size=micro_batch_size or MICRO_BATCH_SIZE,
        num_rounds=NUM_ROUNDS,
        seed=seed,
        deadline_s=limit_s or DEADLINE_S,
        on_progress=session.note,
    )
    write_layer_profile(chosen, measured)
    hint = (
        f"written to {chosen}; plan with it: springtide plan-pipeline --profile {chosen} --service aws, "
        f"or run: springtide run {as_typed(path)} --on functions --profile {chosen}"
    )
    session.answer(measured, layers_text(measured), hint)


def layers_text(file: LayerProfileFile) -> str:
    """One line for each layer, or for the most expensive ones, and the sum of all."""
    profile = file.profile
    layers = list(enumerate(profile.layers))
    shown = layers
    if len(layers) > _MAX_ROWS:
        dearest = sorted(layers, key=lambda pair: (-_seconds(pair[1]), pair[0]))[:_MAX_ROWS]
        shown = sorted(dearest, key=lambda pair: pair[0])
    rows = [(str(index), layer.name, *_cells(layer)) for index, layer in shown]
    rows.append(("", "all", *_cells_of_all(profile.layers)))
    header = ("LAYER", "NAME", "FORWARD", "BACKWARD", "PARAMETERS", "KEPT", "OUTPUT", "GRADIENT")
    left_out = f"\nthe {_MAX_ROWS} longest of {len(layers)} layers" if len(layers) > _MAX_ROWS else ""
    title = (
        f"{profile.model}: {len(layers)} layers, micro-batches of {profile.micro_batch_size}, "
        f"{file.num_samples} samples; {profile.source}"
    )
    base = (
        f"a function holds {profile.base_bytes / _MIB:.0f} MB beside them; "
        f"computation takes {profile.slowdown:.2f} times as long beside communication"
    )
    return f"{title}\n\n{align(header, rows)}{left_out}\n\n{base}"


def _cells(layer: LayerProfile) -> tuple[str, ...]:
    forward_s, backward_s = layer.forward_s[0], layer.backward_s[0]
    sizes = (layer.parameter_bytes, layer.activation_bytes, layer.output_bytes, layer.gradient_bytes)
    return (_time(forward_s), _time(backward_s), *(_size(size) for size in sizes))


def _cells_of_all(layers: tuple[LayerProfile, ...]) -> tuple[str, ...]:
    return (
        _time(sum(layer.forward_s[0] or 0.0 for layer in layers)),
        _time(sum(layer.backward_s[0] or 0.0 for layer in layers)),
        _size(sum(layer.parameter_bytes for layer in layers)),
        _size(sum(layer.activation_bytes for layer in layers)),
        "",
        "",
    )


def _seconds(layer: LayerProfile) -> float:
    return (layer.forward_s[0] or 0.0) + (layer.backward_s[0] or 0.0)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "does not fit"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.4g} MB"
    return f"{num_bytes / 1024:.3g} KB" if num_bytes >= 1024 else f"{num_bytes} B"
