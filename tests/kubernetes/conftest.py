"""The clusters that these tests run against. `cluster` is any; `node_cluster` has real kubelets that may be stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster, Lab, missing_lab, running
from lab_nodes import NodeLab, missing_nodes
from serving_kit import NODE, ThisMachine


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster that KUBECONFIG names, else an API server with controllers of this session's own."""
    if named := os.environ.get("KUBECONFIG"):
        yield Cluster(Path(named))
        return
    if why := missing_lab():
        pytest.skip(why)
    with running(Lab()) as lab:
        yield Cluster(lab.kubeconfig, lab)


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of one test's own."""
    with cluster.namespace("test") as name:
        yield name


@pytest.fixture(scope="session")
def node_lab() -> Iterator[NodeLab]:
    """Two real nodes of this session's own, whatever KUBECONFIG names: these tests stop kubelets and API servers."""
    if why := missing_lab() or missing_nodes():
        pytest.skip(why)
    with running(NodeLab()) as lab:
        assert isinstance(lab, NodeLab)
        yield lab


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> ThisMachine | NodeLab:
    """The cluster that KUBECONFIG names if this machine is a node of it, else the session's lab with nodes."""
    if named := os.environ.get("KUBECONFIG"):
        found = ThisMachine(Path(named))
        if found.api.find(f"api/v1/nodes/{NODE}") is None:
            pytest.skip(f"pods reach a platform of this machine on its own nodes, and {named} has no node {NODE}")
        found.offer(4)
        return found
    lab = request.getfixturevalue("node_lab")
    assert isinstance(lab, NodeLab)
    ThisMachine(lab.kubeconfig).offer(4)
    return lab
