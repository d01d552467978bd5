"""The torch devices of a worker."""

from __future__ import annotations

import os

import torch

from springtide.core.errors import InvalidRequest


def worker_devices(device_kind: str, device_index: int, num_devices: int) -> list[torch.device]:
    """The torch devices of a worker; the first GPU is made the current one. CPU slots are all the device "cpu".

    Raises InvalidRequest if it was given more GPUs than torch sees.
    """
    if device_kind == "cpu":
        return [torch.device("cpu")] * num_devices
    if not torch.cuda.is_available():
        raise InvalidRequest("this worker was given a GPU, but torch sees none; install a CUDA build of torch")
    # With one visible device that device has index 0, whatever its index on the machine.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = 0 if visible is not None and "," not in visible else device_index
    if num_devices > 1 and first + num_devices > torch.cuda.device_count():
        raise InvalidRequest(
            f"this worker was given {num_devices} GPUs, but torch sees {torch.cuda.device_count()}; see `springtide "
            "doctor`"
        )
    torch.cuda.set_device(first)
    return [torch.device("cuda", first + number) for number in range(num_devices)]
