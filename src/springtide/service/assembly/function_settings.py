"""The settings of the function service that a platform connects to: their checks, and their file in its state."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from springtide.backends.functions.parameter_store.address import EXAMPLE, is_fixed, parse_hosted
from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, InvalidSetting, SettingName
from springtide.storage.files import write_durable

Provider = Literal["emulator", "aws", "alibaba"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)
MAX_CONCURRENCY = 10_000
MAX_PLACES = 64
# The default number of concurrent jobs; each has a coordinator on this machine.
DEFAULT_PLACES = 4
_FILE = "functions.json"
_STORE_SCHEMES = ("file", "s3")
_STORE = SettingName("functions.store")
_PARAMETER_STORE = SettingName("functions.parameter_store")
_FAULTS = SettingName("functions.faults")
# The faults that the emulator can inject, as in `--functions-faults kill=0.05,throttled=0.1`.
FAULTS = ("kill", "lost", "answer_lost", "late", "throttled", "slow")


class FunctionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which function service to use and how to reach it. Credentials are not included: the provider's files hold them.

    `store` is the URL of the store for jobs' objects. `parameter_store` (optional) carries activations and gradients:
    also the URL of a store, or of one that is started for each job (docs/storage.md). `role` is the functions' role at
    the provider, `image` their container image (empty: a zip file), `endpoint` another address of the provider's API.
    `name` is the platform's name, a part of its functions' names (provider.function_prefix). `concurrency` is how many
    functions jobs use at a time; as many successors may warm up in addition. `places` is the number of concurrent
    jobs. For the emulator only: `lifetime_s`, `bytes_per_s` of each function and direction, and `faults`, the fraction
    of invocations with each of FAULTS, drawn from `seed`.
    """

    provider: Provider
    store: str = ""
    parameter_store: str = ""
    region: str = ""
    role: str = ""
    image: str = ""
    endpoint: str = ""
    name: str = ""
    concurrency: int | None = None
    places: int = DEFAULT_PLACES
    lifetime_s: float | None = None
    bytes_per_s: float | None = None
    faults: dict[str, float] = {}
    seed: int = 0

    @property
    def is_emulated(self) -> bool:
        """Whether the emulator runs the functions."""
        return self.provider == "emulator"


def check_settings(settings: FunctionSettings) -> None:
    """Check that the settings fit together. Raises InvalidRequest that names the setting to change."""
    _check_address(settings.store, _STORE_SCHEMES, _STORE, "s3://bucket/springtide")
    _check_parameter_store(settings)
    for what, value, most in (
        (SettingName("functions.concurrency"), settings.concurrency, MAX_CONCURRENCY),
        (SettingName("functions.places"), settings.places, MAX_PLACES),
    ):
        if value is not None and not 1 <= value <= most:
            raise InvalidSetting(what, f" must be from 1 to {most:,}, got {value}")
    for fault, fraction in settings.faults.items():
        if fault not in FAULTS:
            raise InvalidSetting(f"there is no fault {fault!r}; ", _FAULTS, f" knows {', '.join(FAULTS)}")
        if not 0.0 <= fraction <= 1.0:
            raise InvalidRequest(f"the fraction of {fault!r} must be from 0 to 1, got {fraction}")
    if settings.is_emulated:
        if settings.store.startswith("s3:") or not settings.store or settings.store.startswith("file:"):
            return
        raise InvalidRequest("the emulator's store is file:///a/path or s3://bucket/prefix?endpoint=http://...")
    _check_cloud(settings)


def _check_cloud(settings: FunctionSettings) -> None:
    """Check the settings of a cloud: none that only the emulator has, all that a cloud needs. Raises InvalidRequest."""
    name = settings.provider
    for setting, is_given in (
        (SettingName("functions.lifetime"), settings.lifetime_s is not None),
        (SettingName("functions.bandwidth"), settings.bytes_per_s is not None),
        (_FAULTS, bool(settings.faults)),
    ):
        if is_given:
            raise InvalidSetting(setting, f" is for the emulator; {name} has its own limits and faults: leave it out")
    if not settings.store.startswith("s3:"):
        raise InvalidSetting(
            f"functions at {name} reach an object store only: name it with ",
            _STORE,
            " s3://bucket/prefix" + ("" if name == "aws" else "?endpoint=https://oss-REGION-internal.aliyuncs.com"),
        )
    if settings.parameter_store.startswith("shm:"):
        raise InvalidSetting(f"functions at {name} share no memory; use ", _PARAMETER_STORE, " redis://HOST:6379/0")
    if not settings.role:
        raise InvalidSetting(
            f"functions at {name} need a role that may read and write the store: ",
            SettingName("functions.role"),
            " arn:aws:iam::ACCOUNT:role/NAME" if name == "aws" else " acs:ram::ACCOUNT:role/NAME",
        )
    if not settings.region:
        region = SettingName("functions.region")
        raise InvalidSetting("name the region that the functions run in: ", region, f" {_region(name)}")


def _check_parameter_store(settings: FunctionSettings) -> None:
    """Check that functions can reach the parameter store, fixed or started for each job. Raises InvalidRequest."""
    address = settings.parameter_store
    if not address or is_fixed(address):
        return
    hosted = parse_hosted(address)
    if hosted is None:
        shown = _without_password(address)
        raise InvalidSetting(_PARAMETER_STORE, f" {shown!r} is no parameter store; write {EXAMPLE}")
    if hosted.kind == "redis" and not settings.is_emulated:
        raise InvalidSetting(
            f"functions at {settings.provider} do not reach a Redis of this machine; use ",
            _PARAMETER_STORE,
            " redis://HOST:6379/0"
            + (" or ecs://CLUSTER/TASK?region=R&subnets=S" if settings.provider == "aws" else ""),
        )
    if hosted.kind == "ecs" and settings.provider == "alibaba":
        raise InvalidSetting("functions at alibaba do not reach AWS; use ", _PARAMETER_STORE, " redis://HOST:6379/0")


def _region(provider: str) -> str:
    return "eu-central-1" if provider == "aws" else "cn-hangzhou"


def _check_address(address: str, schemes: tuple[str, ...], setting: SettingName, example: str) -> None:
    if not address:
        return
    parts = urlsplit(address)
    if parts.scheme not in schemes or not (parts.netloc or parts.path.strip("/")):
        shown = _without_password(address)
        raise InvalidSetting(setting, f" {shown!r} is not an address of a store; write it like {example}")


def _without_password(address: str) -> str:
    """The address with its password (between the colon and the @) replaced, and cut to 200 characters."""
    parts = urlsplit(address)
    if parts.password is None:
        return address[:200]
    return address.replace(f":{parts.password}@", ":...@")[:200]


def shown_address(address: str) -> str:
    """An address for logs and messages, without its password."""
    return _without_password(address)


def parse_faults(text: str) -> dict[str, float]:
    """Parse `kill=0.05,throttled=0.1`. Raises InvalidRequest."""
    faults: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, separator, value = part.strip().partition("=")
        try:
            faults[name] = float(value)
        except ValueError:
            separator = ""
        if not separator or name not in FAULTS or not 0.0 <= faults[name] <= 1.0:
            raise InvalidRequest(
                f"{part.strip()!r} is not a fault; write fractions like kill=0.05,throttled=0.1 of {', '.join(FAULTS)}"
            )
    return faults


def write_settings(state_dir: Path, settings: FunctionSettings | None) -> Path | None:
    """Write the settings for the platform's process, readable by the owner only: an address may hold a password.

    None deletes the file. Returns its path. Raises StorageError.
    """
    path = state_dir / _FILE
    if settings is None:
        path.unlink(missing_ok=True)
        return None
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durable(path, msgspec.json.encode(settings), mode=0o600)
    return path


def read_settings(path: Path) -> FunctionSettings:
    """Read the settings that `write_settings` wrote. Raises InvalidRequest."""
    try:
        settings = decode_json(path.read_bytes(), FunctionSettings)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} cannot be read: {error}; start with `springtide up --functions ...` again"
        ) from None
    check_settings(settings)
    return settings
