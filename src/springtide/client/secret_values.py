"""The values of secrets, where they are submitted from: this process's environment, files, or given ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.core.options.variables import MAX_VARIABLES_BYTES, Secrets, secret_sources


def secret_values(secrets: Secrets, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The value of each secret by name. Raises InvalidRequest, without any value in it."""
    return {name: _value(name, source, environment) for name, source in secret_sources(secrets, "secrets").items()}


def _value(name: str, source: str | Path | None, environment: Mapping[str, str]) -> str:
    if source is None:
        value = environment.get(name, "")
        if not value:
            raise InvalidRequest(
                f"the secret {name} has no value here: set the variable {name}, or name a file: {name}=@FILE"
            )
        return value
    if isinstance(source, str):
        value = source
    else:
        path = source.expanduser()
        try:
            if path.stat().st_size > MAX_VARIABLES_BYTES:
                raise InvalidRequest(f"the secret {name} is larger than {MAX_VARIABLES_BYTES:,} bytes")
            # Editors and `echo` end a file with a line break that belongs to no value.
            value = path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise InvalidRequest(f"the secret {name} is not UTF-8 text; encode it, as base64 does") from None
        except OSError as error:
            raise InvalidRequest(f"the secret {name} cannot be read from {path}: {error.strerror or error}") from None
    if not value:
        raise InvalidRequest(f"the secret {name} is empty; give it a value, or leave it out")
    return value
