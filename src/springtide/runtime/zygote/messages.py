"""Messages between the zygote and the processes with libraries; frames are those of core/wire/workers.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from springtide.core.wire.workers import Spawned, WorkerSpec
from springtide.runtime.process.user_environment import user_variables

# Which GPUs a process sees: workers hold one or another, and libraries at most count them when they are imported.
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# Variables that code beneath Python reads, where it is not seen, and those that a library looks for among all names.
PREFIXES: Final = (
    "ARROW_",
    "C10_",
    "CUBLAS",
    "CUDA",
    "CUDNN",
    "FSSPEC_",
    "GLIBC_",
    "GLOO_",
    "GOMP_",
    "GOTO_",
    "HF_XET_",
    "HIP_",
    "HSA_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NUMEXPR_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "RAYON_",
    "ROCR_",
    "TOKENIZERS_",
    "TORCH",
    "TRITON_",
    "XLA_",
)


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """From a process with libraries: they are imported, and it may be forked.

    `found` are the packages that came with them, `missing` those that were looked for in vain, `variables` those of the
    environment that were read meanwhile.
    """

    found: frozenset[str]
    missing: frozenset[str]
    variables: frozenset[str]
    cpu_s: float = 0.0
    private_mib: int = 0


class NotImported(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """From a process that ends, because it must not be forked."""

    reason: str


FromPreloaded = Imported | NotImported | Spawned


def chosen_variables(spec: WorkerSpec) -> Mapping[str, str]:
    """The variables that workers of the same job or service share and others may not: its owner's, and those of its
    share of the machine."""
    return MappingProxyType({**spec.environment, **spec.workload.env})


def own_variables(spec: WorkerSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """All variables, but secrets, that a worker sets at its start in a process with this environment."""
    return {**spec.environment, **user_variables(spec.workload, {**environment, **spec.environment})}
