"""Deliberately broken builds of how the library is found, and the test that finds each of them."""

from __future__ import annotations

_HERE = "tests/native/test_native_packaging.py"
_LIBRARY = "src/springtide/backends/sharing/gpu/library.py"

BROKEN = (
    (
        "whatever else is preloaded comes before the library",
        _LIBRARY,
        '":".join([str(library), *others])',
        '":".join([*others, str(library)])',
        f"{_HERE}::test_the_library_comes_first_and_once",
    ),
    (
        "changed sources make the same file, which running processes have mapped",
        _LIBRARY,
        'digest.update(path.name.encode() + b"\\0" + path.read_bytes())',
        'digest.update(path.name.encode() + b"\\0")',
        f"{_HERE}::test_other_sources_make_another_file",
    ),
    (
        "a library that this machine cannot load is preloaded all the same",
        _LIBRARY,
        "if shipped.is_file() and not why_not_preloaded(shipped):",
        "if shipped.is_file():",
        f"{_HERE}::test_what_came_with_the_package_and_does_not_load_is_built_anew",
    ),
)
