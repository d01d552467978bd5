"""Extensions from other installed distributions: objects that they offer under an entry point group."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from springtide.core.errors import InvalidRequest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def offered(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, sorted by name. Imports none of the modules that they name."""
    # Imported here: it takes longer than most commands' own imports.
    from importlib.metadata import entry_points

    return MappingProxyType({point.name: point for point in sorted(entry_points(group=group))})


def load_from_studies(group: str, name: str, what: str) -> Any:
    """Import the object that springtide-studies offers under `name`; `what` names it in the error.

    Raises InvalidRequest, which says how to install it, if no installed distribution offers the name, and ImportError
    if the offered module cannot be imported.
    """
    point = offered(group).get(name)
    if point is None:
        raise InvalidRequest(f"{what} comes with springtide[studies]: pip install 'springtide[studies]'")
    return point.load()
