"""A source as the API takes it in a request's body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, Protocol

from springtide.client.sources.source import SentFolder


class SourceLike(Protocol):
    """One Python file and the object in it to run; client.source.SourceFile implements it."""

    @property
    def filename(self) -> str:
        """The file's name without folders."""
        ...

    @property
    def text(self) -> str:
        """The file's whole content."""
        ...

    @property
    def object_name(self) -> str:
        """The name of the function or class; empty for a script."""
        ...

    @property
    def kind(self) -> Literal["function", "class", "script"]:
        """What `object_name` is; "script" runs the whole file."""
        ...

    @property
    def args(self) -> tuple[str, ...]:
        """The command-line arguments of a script."""
        ...

    @property
    def import_root(self) -> str:
        """The folder on workers' machines from which the file imports others; empty for none."""
        ...

    @property
    def files(self) -> Mapping[str, str]:
        """The texts of further files to send, by path relative to this one."""
        ...


def source_body(source: SourceLike, folder: SentFolder | None = None) -> dict[str, Any]:
    """The object `source` of a request; what is empty and newer than the first release is left out."""
    return {
        "filename": source.filename,
        "text": source.text,
        "object_name": source.object_name,
        "kind": source.kind,
        "args": list(source.args),
        "import_root": source.import_root if folder is None else "",
        **({"files": dict(source.files)} if source.files else {}),
        **({"folder": asdict(folder)} if folder is not None else {}),
    }
