"""All-reduces for measurements: a group whose exchanges run one after another, and a watch for both kinds of device."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from springtide.runtime.process.child_member import LostPeer


class DeviceTimer:
    """Moments on a device: on a CPU the clock's, on a GPU those at which its stream gets there."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"

    def now(self) -> Any:
        """A moment, for `seconds` only."""
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; waits until the device is there."""
        if not self._is_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


class MeasuredExchange:
    """The members of a measurement, connected by gloo, or by NCCL where they have GPUs."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        num_members: int,
        device: torch.device,
        address: str,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self.num_members = num_members
        self._device = device
        try:
            self._group = _connect(store, rank, num_members, device, address, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error
        self._one = torch.zeros(1, device=device)

    def start(self, tensor: torch.Tensor) -> Any:
        """Begin to sum the tensor over all members, in place; returns the work to wait for."""
        return self._group.allreduce([tensor], c10d.AllreduceOptions())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum the tensor over all members, in place; on a GPU this is queued, not waited for. Raises LostPeer."""
        try:
            self.start(tensor).wait()
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error

    def meet(self) -> None:
        """Wait until every member is here. Raises LostPeer."""
        self.all_reduce(self._one)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def most(self, values: list[float]) -> list[float]:
        """The largest of each value over all members. Raises LostPeer."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error
        return [float(value) for value in tensor.cpu()]


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _connect(
    store: c10d.Store, rank: int, num_members: int, device: torch.device, address: str, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        return c10d.ProcessGroupNCCL(store, rank, num_members, c10d.ProcessGroupNCCL.Options())
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # With one thread exchanges run in the order in which they are begun, one at a time, as the timeline has them.
    options._threads = 1
    create_device: Any = c10d.ProcessGroupGloo.create_device
    options._devices = [create_device(hostname=address)]
    return c10d.ProcessGroupGloo(store, rank, num_members, options)
