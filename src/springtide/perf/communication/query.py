"""Predicting the time of collectives: measured samples and their files, queries, and the protocol of predictors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, Node, Topology
from springtide.perf.communication.fabric import Fabric, Links, Subgraph

DTYPES = ("float32", "float16", "bfloat16", "int8")


class CommunicationSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured collective: the devices, the bytes that each contributed, and its duration (a median)."""

    device_ids: tuple[DeviceId, ...]
    num_bytes: int
    duration_s: float
    dtype: str = "float32"


class SampleFile(msgspec.Struct, frozen=True, kw_only=True):
    """Samples with the cluster on which they were measured; `source` says how, in words. Stored as JSON.

    With one entry in `links` it is that of all nodes; otherwise each node has the entry of its position.
    """

    source: str
    nodes: tuple[Node, ...]
    links: tuple[Links, ...]
    samples: tuple[CommunicationSample, ...]
    collective: str = "all_reduce"

    def fabric(self) -> Fabric:
        """The cluster as a graph. Raises InvalidRequest if nodes and links do not go together."""
        if len(self.links) not in (1, len(self.nodes)):
            raise InvalidRequest(
                f"{len(self.nodes)} nodes with {len(self.links)} kinds of links; give one for all or one for each node"
            )
        topology = Topology(nodes=self.nodes)
        if len(self.links) == 1:
            return Fabric(topology, self.links[0])
        return Fabric(topology, {node.node_id: links for node, links in zip(self.nodes, self.links, strict=True)})

    def queries(self) -> tuple[list[Query], NDArray[np.float64]]:
        """The samples as queries, and their durations (s)."""
        fabric = self.fabric()
        queries = [Query(fabric.subgraph(sample.device_ids), sample.num_bytes, sample.dtype) for sample in self.samples]
        return queries, np.array([sample.duration_s for sample in self.samples])


class Query(msgspec.Struct, frozen=True):
    """A collective whose time is to be predicted. `num_bytes` is the size of the tensor of every member."""

    subgraph: Subgraph
    num_bytes: int
    dtype: str = "float32"


class CommunicationModel(Protocol):
    """Predicts how long an all-reduce takes."""

    name: str

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        """Seconds of each query; 0 for a single device."""
        ...


def read_samples(path: Path) -> SampleFile:
    """Read a file of samples. Raises InvalidRequest if it cannot be read or is invalid."""
    try:
        return decode_json(path.read_bytes(), SampleFile)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); name a file of measured samples") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"{path} holds no samples ({error}); `springtide profile communication` writes such"
        ) from None


def write_samples(path: Path, samples: SampleFile) -> None:
    """Write a file of samples that `read_samples` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(samples), indent=1) + b"\n")
