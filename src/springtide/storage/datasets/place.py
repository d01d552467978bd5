"""Where a platform keeps its datasets: in its functions' object store, else in a store of its state directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest

# As service/function_settings.py writes them; of these one field is needed here.
_SETTINGS_FILE = "functions.json"


class _Settings(msgspec.Struct):
    store: str = ""


def data_store_url(state_dir: Path) -> str:
    """The URL of the store for datasets of the platform with this state directory. Raises InvalidRequest.

    A platform without functions uses the store that its emulator would have, so that datasets are there for it.
    """
    path = state_dir / _SETTINGS_FILE
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=_Settings)
    except FileNotFoundError:
        settings = _Settings()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error}); start the platform with `springtide up` again"
        ) from None
    return settings.store or f"file://{(state_dir / 'functions' / 'store').resolve()}"
