"""Sources of datasets on the command line: files of arrays, or a user's function."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from springtide.cli.loading import import_file
from springtide.cli.session import refuse
from springtide.core.errors import StorageError

_KINDS = "give arrays.npz, array.npy, arrays.safetensors or FILE.py:FACTORY"


def pieces_of(source: str) -> Iterator[dict[str, Any]]:
    """The named arrays of a source, in one or several pieces. Raises InvalidRequest."""
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        yield _npz(path)
    elif path.suffix == ".npy":
        yield {"x": _npy(path)}
    elif path.suffix == ".safetensors":
        yield _safetensors(path)
    else:
        head, separator, factory = source.rpartition(":")
        if not separator or not head.endswith(".py") or not factory:
            if source.endswith(".py"):
                refuse(f"name the function that returns the arrays, after a colon: {source}:FACTORY")
            refuse(f"{source} is no source of samples; {_KINDS}")
        yield from _made(Path(head).expanduser(), factory)


def _npz(path: Path) -> dict[str, Any]:
    import zipfile

    import numpy as np

    try:
        # Opened here, because numpy leaves its own handle open if the file is not an archive.
        with _there(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        refuse(f"{path} cannot be read as .npz: {_first_line(error)}; write it with numpy.savez(path, x=..., y=...)")


def _npy(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(_there(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        refuse(f"{path} cannot be read as .npy: {_first_line(error)}; write it with numpy.save(path, array)")


def _safetensors(path: Path) -> dict[str, Any]:
    from springtide.storage.frames import decode

    try:
        with _there(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        frame = decode(memoryview(mapped))
    except (OSError, ValueError, StorageError) as error:
        refuse(f"{path} cannot be read as .safetensors: {_first_line(error)}; is it one?")
    for name, tensor in frame.tensors.items():
        if tensor.dtype.startswith(("BF", "F8")):
            refuse(f"{path} has {name} as {tensor.dtype}, which numpy does not know; convert it to float32 first")
    return {name: tensor.array() for name, tensor in frame.tensors.items()}


def _made(path: Path, factory: str) -> Iterator[dict[str, Any]]:
    """The arrays that the user's function returns or yields."""
    module = import_file(_there(path).resolve())
    function = getattr(module, factory, None)
    if not callable(function):
        refuse(f"{path.name} has no function {factory!r}; define `def {factory}(): return dict(x=..., y=...)` in it")
    try:
        made = function()
        if isinstance(made, Mapping | tuple | list) or hasattr(made, "tensors"):
            yield _named(made, path, factory)
            return
        if not hasattr(made, "__next__"):
            refuse(_no_arrays(made, path, factory))
        for piece in made:
            yield _named(piece, path, factory)
    except StorageError:
        raise
    except Exception as error:
        from springtide.core.errors import SpringtideError

        if isinstance(error, SpringtideError):
            raise
        # User code: any exception is reported as the function's error.
        refuse(f"{factory} in {path.name} failed: {type(error).__name__}: {_first_line(error)}")


def _named(made: Any, path: Path, factory: str) -> dict[str, Any]:
    """Arrays by name: a mapping unchanged; the items of a tuple, or of a TensorDataset, become x and y."""
    if isinstance(made, Mapping):
        return {str(name): array for name, array in made.items()}
    values = getattr(made, "tensors", made)
    if not isinstance(values, tuple | list) or not 1 <= len(values) <= 2:
        refuse(_no_arrays(made, path, factory))
    return dict(zip(("x", "y"), values, strict=False))


def _no_arrays(made: Any, path: Path, factory: str) -> str:
    return (
        f"{factory} in {path.name} gave {type(made).__name__}; it must return named arrays, dict(x=..., y=...), or "
        "x, y, or yield pieces of that kind"
    )


def _there(path: Path) -> Path:
    if not path.is_file():
        refuse(f"there is no file {str(path)!r}; {_KINDS}")
    return path


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
