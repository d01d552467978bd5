"""The shape of a cluster as people write it: `16x8`, `16x8@6+6+4` or `8x4:V100,4x8:T4`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceKind, Node, make_node
from springtide.workloads.trace import MAX_DEVICES


def parse_cluster(text: str) -> tuple[int, int]:
    """`16x8` as (nodes, devices per node); switches after an `@` are checked and dropped. Raises InvalidRequest."""
    shape, _, switches = text.strip().lower().partition("@")
    nodes, separator, devices = shape.partition("x")
    if not separator or not _is_count(nodes) or not _is_count(devices):
        raise InvalidRequest(f"cluster {text!r:.60} is not NODESxDEVICES; write it like 16x8 or 16x8@6+6+4")
    if int(nodes) * int(devices) > MAX_DEVICES:
        raise InvalidRequest(f"cluster {text!r:.60} has over {MAX_DEVICES:,} devices; give a smaller one, such as 16x8")
    if "@" in text:
        _switches(text, switches, int(nodes))
    return int(nodes), int(devices)


def cluster_nodes(text: str, *, kind: DeviceKind = "gpu") -> list[Node]:
    """The nodes of a cluster as written, with the switches above each (nearest first, the last above all).

    `16x8@6+6+4`: three switches with 6, 6 and 4 nodes below one core switch. `1000x8@10x10x10`: a tree, ten nodes
    below each of the nearest switches, ten of these below each of the next, and so on; the last may be filled in part.
    Without `@` all nodes are below one switch. `8x4:V100,4x8:T4`: nodes whose devices are of different models. Raises
    InvalidRequest.
    """
    parts = text.split(",")
    if len(parts) > 1 or ":" in text:
        return _nodes_of_models(text, parts, kind)
    num_nodes, per_node = parse_cluster(text)
    _, _, behind = text.strip().lower().partition("@")
    ways = _switches(text, behind, num_nodes) if behind else [()] * num_nodes
    width = max(3, len(str(num_nodes - 1)))
    return [make_node(f"node-{index:0{width}d}", per_node, kind=kind, switches=way) for index, way in enumerate(ways)]


def _nodes_of_models(text: str, parts: Sequence[str], kind: DeviceKind) -> list[Node]:
    shapes = [(parse_cluster(shape), model.strip()) for shape, _, model in (part.partition(":") for part in parts)]
    if "@" in text or not all(model for _, model in shapes):
        raise InvalidRequest(f"cluster {text!r:.60} mixes models; write NODESxDEVICES:MODEL for each: 8x4:V100,4x8:T4")
    if sum(num_nodes * per_node for (num_nodes, per_node), _ in shapes) > MAX_DEVICES:
        raise InvalidRequest(f"cluster {text!r:.60} has over {MAX_DEVICES:,} devices; give a smaller one")
    described = [(per_node, model) for (num_nodes, per_node), model in shapes for _ in range(num_nodes)]
    width = max(3, len(str(len(described) - 1)))
    return [
        make_node(f"node-{index:0{width}d}", per_node, kind=kind, accelerator=model)
        for index, (per_node, model) in enumerate(described)
    ]


def _switches(text: str, behind: str, num_nodes: int) -> list[tuple[str, ...]]:
    is_tree = "x" in behind
    counts = behind.split("x" if is_tree else "+")
    if not all(_is_count(count) for count in counts):
        raise InvalidRequest(f"the switches of cluster {text!r:.60} are no counts; write 16x8@6+6+4 or 1000x8@10x10x10")
    if is_tree:
        wide = 1
        most = math.prod(int(count) for count in counts)
        if most < num_nodes:
            raise InvalidRequest(f"the switches of cluster {text!r:.60} hold {most} nodes of {num_nodes}; add some")
        found: list[tuple[str, ...]] = [()] * num_nodes
        for level, count in enumerate(counts):
            wide *= int(count)
            found = [(*way, f"switch-{level}-{index // wide}") for index, way in enumerate(found)]
        return found
    sizes = [int(count) for count in counts]
    if sum(sizes) != num_nodes:
        raise InvalidRequest(
            f"the switches of cluster {text!r:.60} hold {sum(sizes)} nodes of {num_nodes}; mend either"
        )
    return [(f"switch-{number}", "core") for number, size in enumerate(sizes) for _ in range(size)]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) > 0
