"""Profiles of a task's layers: their files, their cache, and the parent process that has a child measure them.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.functions import MAX_LAYERS, ModelProfile
from springtide.core.workload import Entrypoint
from springtide.runtime.process.child_processes import MeasurementProcesses
from springtide.runtime.profiling.task_profile import TaskProfile
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.stores.open import open_store

DEADLINE_S = 600.0
MICRO_BATCH_SIZE = 4
NUM_ROUNDS = 5
_MAX_FILE_BYTES = 16 << 20
# Increase it when the measurement changes, so that cached profiles are measured again.
_VERSION = 2
_NO_PARAMS: Mapping[str, str] = MappingProxyType({})
# Limits the threads of numpy's and JAX's linear algebra; torch's are set in the child.
_ONE_THREAD: Mapping[str, str] = MappingProxyType(
    {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
)


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process is to measure.

    `directory` is the measurement's folder, `name` that of the child's files in it. A model that is not cut into layers
    may be measured with micro-batches of up to `largest_micro_batch` samples.
    """

    entrypoint: Entrypoint
    model_name: str
    micro_batch_size: int
    num_rounds: int
    directory: str
    seed: int = 0
    params: dict[str, str] = {}
    largest_micro_batch: int = 0
    name: str = "layers"


class LayerProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """A measured profile of a task's layers, with the source text and params that it was measured for.

    `num_samples` is the dataset's length, None if the task trains on `stream`. `dataset` is the name of a named
    dataset.
    """

    format: Literal["springtide-layers-1"] = "springtide-layers-1"
    profile: ModelProfile
    num_samples: int | None = None
    num_layers: int
    source_sha256: str
    object_name: str
    params: dict[str, str] = {}
    stream: str = ""
    dataset: str = ""


def profile_source_layers(
    entrypoint: Entrypoint,
    *,
    name: str,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    num_rounds: int = NUM_ROUNDS,
    seed: int = 0,
    params: Mapping[str, str] = _NO_PARAMS,
    largest_micro_batch: int = 0,
    state_dir: str = "",
    deadline_s: float = DEADLINE_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LayerProfileFile:
    """Measure the layers of a declared task in a child process, on one thread of this machine.

    A model that cannot be cut into layers is measured as a whole, with micro-batches of up to `largest_micro_batch`
    samples while their activations are small. `params` are the job's; `state_dir` is the state directory of the
    platform whose datasets the task names (empty: the default). Raises InvalidRequest if the file or its task is at
    fault, BackendError if the measurement fails or exceeds the deadline.
    """
    if micro_batch_size < 1 or num_rounds < 1:
        raise InvalidRequest("a profile of layers takes a micro-batch of at least one sample and at least one round")
    digest = hashlib.sha256(Path(entrypoint.source_path).read_bytes()).hexdigest()
    with MeasurementProcesses(deadline_s=deadline_s, on_progress=on_progress) as processes:
        spec = LayerSpec(
            entrypoint=entrypoint,
            model_name=name,
            micro_batch_size=micro_batch_size,
            num_rounds=num_rounds,
            seed=seed,
            params=dict(params),
            largest_micro_batch=largest_micro_batch,
            directory=str(processes.directory),
        )
        path = processes.directory / "layers.spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        # Makes a file that submits jobs on import raise an error.
        environment = {"SPRINGTIDE_IMPORTING": "1", **_ONE_THREAD}
        if state_dir:
            environment["SPRINGTIDE_STATE"] = state_dir
        processes.start(spec.name, ["profile-layers", "--spec", str(path)], environment=environment)
        try:
            processes.wait()
        except BackendError as error:
            raise BackendError(f"the layers of {name} could not be profiled: {error}") from None
        taken = decode_json(processes.files(spec.name).result.read_bytes(), TaskProfile)
    return LayerProfileFile(
        profile=taken.profile,
        num_samples=taken.num_samples,
        num_layers=len(taken.profile.layers),
        source_sha256=digest,
        object_name=entrypoint.object_name,
        params=dict(params),
        stream=taken.stream,
        dataset=taken.dataset,
    )


def cached_source_layers(
    entrypoint: Entrypoint,
    cache: Path,
    *,
    name: str,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    params: Mapping[str, str] = _NO_PARAMS,
    largest_micro_batch: int = 0,
    state_dir: str = "",
    on_progress: Callable[[str], None] = lambda _: None,
) -> LayerProfileFile:
    """As `profile_source_layers`, but reads the profile from the folder `cache` if it was measured before.

    The cache's key holds the source text and params. The length of a named dataset is read anew each time.
    """
    text = Path(entrypoint.source_path).read_bytes()
    sizes = f"{micro_batch_size} {largest_micro_batch}"
    options = f"{_VERSION}\n{entrypoint.object_name}\n{sizes}\n{sorted(params.items())}\n".encode()
    path = cache / f"{hashlib.sha256(options + text).hexdigest()[:32]}.layers.json"
    if path.is_file():
        try:
            return _with_length(read_layer_profile(path), state_dir)
        except InvalidRequest:
            # Damaged, for example by a crash while it was written: measure again and replace it.
            path.unlink(missing_ok=True)
    measured = profile_source_layers(
        entrypoint,
        name=name,
        micro_batch_size=micro_batch_size,
        params=params,
        largest_micro_batch=largest_micro_batch,
        state_dir=state_dir,
        on_progress=on_progress,
    )
    cache.mkdir(parents=True, exist_ok=True)
    write_layer_profile(path, measured)
    return measured


def _with_length(file: LayerProfileFile, state_dir: str) -> LayerProfileFile:
    """The profile with the present length of its named dataset, which may have been replaced since."""
    if not file.dataset:
        return file
    from springtide.runtime.data.dataset_reader import open_dataset

    store = open_store(data_store_url(Path(state_dir))) if state_dir else None
    try:
        reader = open_dataset(DatasetReference(name=file.dataset), store)
        num_samples = reader.num_samples
        reader.close()
    finally:
        if store is not None:
            store.close()
    return msgspec.structs.replace(file, num_samples=num_samples)


def write_layer_profile(path: Path, profile: LayerProfileFile) -> None:
    """Write the profile as indented JSON, atomically."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    temporary.replace(path)


def read_layer_profile(path: Path) -> LayerProfileFile:
    """Read what `write_layer_profile` or `springtide profile --layers` wrote. Raises InvalidRequest."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_FILE_BYTES else b""
        found = decode_json(data, LayerProfileFile)
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "strerror", "") or error
        raise InvalidRequest(
            f"{path} is no profile of layers ({reason}); make one with `springtide profile FILE --layers --out {path}`"
        ) from None
    num_sizes = len(found.profile.memory_mb)
    times = [len(layer.forward_s) == len(layer.backward_s) == num_sizes for layer in found.profile.layers]
    if not 1 <= len(times) <= MAX_LAYERS or not num_sizes or not all(times):
        raise InvalidRequest(f"{path} is no profile of layers: each needs a time for each of its memory sizes")
    return found


def main(options: Any) -> int:
    """`python -m springtide.runtime profile-layers` without --spec: write the profile to a file."""
    if not (options.source and options.object and options.out):
        _tell("give --source FILE --object NAME --out PROFILE.json")
        return 2
    entrypoint = Entrypoint(
        source_path=str(Path(options.source).resolve()), object_name=options.object, import_root=options.import_root
    )
    try:
        measured = profile_source_layers(
            entrypoint,
            name=Path(options.source).stem,
            micro_batch_size=options.micro_batch,
            on_progress=_tell,
        )
        write_layer_profile(options.out, measured)
    except (SpringtideError, OSError) as error:
        _tell(str(error))
        return 1
    return 0


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
