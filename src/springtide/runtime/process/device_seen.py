"""Which GPU this process found: on Kubernetes the device plugin chooses it, and only the container is told."""

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


def device_seen(device_kind: str) -> str:
    """The name of this process's GPU: a UUID if one is known, else its number; and its model if CUDA is in use.

    Empty on CPU devices, and where nothing tells.
    """
    if device_kind != "gpu":
        return ""
    given = next((name for variable in VARIABLES if (name := _name_in(os.environ.get(variable, "")))), "")
    uuid, model = _from_cuda()
    # CUDA's word counts more, but it does not say that a device is a part of another one.
    name = given if given.startswith(_PART) else uuid or given
    return (f"{name} ({model})" if name and model else name or model)[:MAX_DEVICE_NAME]


def _name_in(value: str) -> str:
    if value.startswith("/"):
        # A device plugin may list devices as mounts: the variable is then the folder, and files in it are their names.
        folder = Path(value)
        return ",".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ""
    return "" if value in _NO_NAMES else value


def _from_cuda() -> tuple[str, str]:
    """UUID and model of the device in use. CUDA is not started for it: that takes memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "", ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(getattr(properties, "uuid", ""))
    return (uuid if uuid.startswith(_UUIDS) or not uuid else f"GPU-{uuid}"), str(properties.name)
