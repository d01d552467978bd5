"""The clusters that these tests run against. `cluster` is any; `node_cluster` has real kubelets that may be stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.lab.lab import Cluster, Lab, missing_lab, running
from kits.kubernetes.lab.nodes import NodeLab, missing_nodes
from kits.kubernetes.serving_kit import NODE, ThisMachine

# The files with tests on real nodes. A machine has room for one lab with nodes: they are one worker's.
NODE_FILES = ("deployment", "devices_each", "executor_kit", "kills", "room", "serving", "shares", "story", "trouble")
_NODE_PATHS = {*(f"test_k8s_{name}.py" for name in NODE_FILES), "test_lab.py"}
_NODE_FIXTURES = {"node_lab", "machine"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file is one worker's, and so are all files with tests on real nodes together.

    They come first and wait for most of the time, while the other worker's tests ask an API server of their own.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "nodes" if Path(path).name in _NODE_PATHS else path

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real nodes first."""
    here = Path(__file__).parent
    items.sort(key=lambda item: (item.path.parent, item.path.name) not in {(here, name) for name in _NODE_PATHS})
    for item in items:
        needs_nodes = bool(_NODE_FIXTURES & {*getattr(item, "fixturenames", ())})
        if needs_nodes and item.path.parent == here and item.path.name not in _NODE_PATHS:
            raise pytest.UsageError(f"{item.path.name} has tests on real nodes: it has to be among NODE_FILES")


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
