"""Which GPUs this process found: on Kubernetes the device plugin chooses them, and only the container is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from springtide.core.wire.workers import MAX_DEVICE_NAME

# What container runtimes and CUDA go by, the nearest to the process first.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Values that name no device: all of them, none, or those that the container runtime was told of in another way (CDI).
_NO_NAMES = ("", "all", "none", "void")
_PART = "MIG-"
_UUIDS = ("GPU-", _PART)
# Longer lists leave no room for the model.
_MAX_UUIDS = 130
_SHORT_UUID = len("GPU-01234567")


def device_seen(device_kind: str, num_devices: int = 1) -> str:
    """The names of this process's GPUs: UUIDs if they are known, else numbers; and their model if CUDA is in use.

    Empty on CPU devices, and where nothing tells. Where so many UUIDs are too long, each is told by its beginning.
    """
    if device_kind != "gpu":
        return ""
    given = next((name for variable in VARIABLES if (name := _name_in(os.environ.get(variable, "")))), "")
    uuids, model = _from_cuda(num_devices)
    if len(",".join(uuids)) > _MAX_UUIDS:
        uuids = [uuid[:_SHORT_UUID] for uuid in uuids]
    # CUDA's word counts more, but it does not say that a device is a part of another one.
    name = given if given.startswith(_PART) else ",".join(uuids) or given
    return (f"{name} ({model})" if name and model else name or model)[:MAX_DEVICE_NAME]


def _name_in(value: str) -> str:
    if value.startswith("/"):
        # A device plugin may list devices as mounts: the variable is then the folder, and files in it are their names.
        folder = Path(value)
        return ",".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ""
    return "" if value in _NO_NAMES else value


def _from_cuda(num_devices: int) -> tuple[list[str], str]:
    """UUIDs and model of the device in use, or of several. CUDA is not started for it: that takes memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return [], ""
    # A worker with several sees its own alone.
    several = range(min(num_devices, torch.cuda.device_count())) if num_devices > 1 else [torch.cuda.current_device()]
    found = [torch.cuda.get_device_properties(index) for index in several]
    uuids = [str(uuid) for properties in found if (uuid := getattr(properties, "uuid", ""))]
    return [uuid if uuid.startswith(_UUIDS) else f"GPU-{uuid}" for uuid in uuids], str(found[0].name)
