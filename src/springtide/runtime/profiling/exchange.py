"""All-reduces for measurements: a group that runs one exchange at a time, and a timer for CPUs and GPUs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from springtide.runtime.elastic.group import connect_gloo
from springtide.runtime.process.child_member import LostPeer


class DeviceTimer:
    """Timestamps on a device: of the clock on a CPU, of the stream's events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"

    def now(self) -> Any:
        """A timestamp, to be passed to `seconds`."""
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The seconds between two timestamps; waits until the device has reached the second."""
        if not self._is_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


class MeasuredExchange:
    """The members of a measurement, connected by gloo, or by NCCL if they have GPUs."""

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
            self.group = _connect(store, rank, num_members, device, address, timeout_s)
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error
        self._one = torch.zeros(1, device=device)

    def start(self, tensor: torch.Tensor) -> Any:
        """Start to sum the tensor over all members, in place; returns torch's work object to wait for."""
        return self.group.allreduce([tensor], c10d.AllreduceOptions())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum the tensor over all members, in place; on a GPU this only queues the sum. Raises LostPeer."""
        try:
            self.start(tensor).wait()
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error

    def barrier(self) -> None:
        """Wait until every member calls this. Raises LostPeer."""
        self.all_reduce(self._one)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def maximum(self, values: list[float]) -> list[float]:
        """The elementwise maximum of `values` over all members. Raises LostPeer."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        try:
            self.group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise LostPeer(str(error).partition("\n")[0]) from error
        return [float(value) for value in tensor.cpu()]


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _connect(
    store: c10d.Store, rank: int, num_members: int, device: torch.device, address: str, timeout_s: float
) -> Any:
    if device.type == "cuda":
        return c10d.ProcessGroupNCCL(store, rank, num_members, c10d.ProcessGroupNCCL.Options())
    store.set(f"at/{rank}", address)
    peers = frozenset(store.get(f"at/{other}").decode() for other in range(num_members))
    # It has one thread: exchanges run one at a time and in order, as the timeline assumes.
    return connect_gloo(store, rank, num_members, address, peers, timeout_s)
