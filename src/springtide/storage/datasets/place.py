"""Where a platform keeps its datasets: in the object store of its functions, or else in its state directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest

# Written by service/assembly/function_settings.py; only one of its fields is needed here.
_SETTINGS_FILE = "functions.json"


class _Settings(msgspec.Struct):
    store: str = ""


def data_store_url(state_dir: Path) -> str:
    """The URL of the store for datasets of the platform with this state directory. Raises InvalidRequest.

    A platform without functions uses the store that its emulator would use, so that the emulator finds the datasets.
    """
    path = state_dir / _SETTINGS_FILE
    try:
        settings = decode_json(path.read_bytes(), _Settings)
    except FileNotFoundError:
        settings = _Settings()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error}); start the platform with `springtide up` again"
        ) from None
    return settings.store or f"file://{(state_dir / 'functions' / 'store').resolve()}"
