"""The checks of `springtide doctor` for function services: libraries, stores, credentials, region and emulator."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from springtide.cli.settings import resolve
from springtide.core.errors import InvalidRequest, InvalidSetting, SpringtideError

_EXTRA = ("boto3", "obstore", "redis", "awslambdaric", "safetensors")
_INSTALL = "pip install 'springtide[functions]'"
_LEAST_MEMORY_BYTES = 2 << 30


class Check(msgspec.Struct, frozen=True):
    """The result of one check, printed as one line."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    mend: str = ""


def check_functions(state_dir: Path) -> Iterator[Check]:
    """Check the configured function service; one line if none is configured."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    provider = resolve("functions")
    kept = state_dir / "functions.json"
    if provider.value in (None, "none") and not kept.exists():
        if missing:
            yield Check("functions", "ok", f"not used; {', '.join(missing)} not installed", f"to use them: {_INSTALL}")
        else:
            yield Check("functions", "ok", "not used", "to train on functions: springtide up --functions emulator")
        return
    if missing:
        yield Check("functions", "fail", f"not installed: {', '.join(missing)}", _INSTALL)
        return
    from springtide.cli.platform.up_functions import NAMES_OF_FUNCTIONS, settings_of, summary_of
    from springtide.service.assembly.function_settings import read_settings, shown_address

    try:
        asked = settings_of(dict.fromkeys(NAMES_OF_FUNCTIONS))
        settings = asked or read_settings(kept)
    except InvalidRequest as error:
        yield Check("functions", "fail", str(error), "springtide config show --origin says where each setting stands")
        return
    yield Check("functions", "ok", summary_of(settings))
    if settings.is_emulated:
        yield from _check_emulator()
    elif settings.provider == "aws":
        yield from _check_aws()
    else:
        yield from _check_alibaba()
    if settings.store:
        yield _check_store("store", settings.store, shown_address(settings.store))
    if settings.parameter_store:
        yield _check_parameters(settings.parameter_store, shown_address(settings.parameter_store))


def _check_emulator() -> Iterator[Check]:
    free = _available_memory_bytes()
    if free is not None and free < _LEAST_MEMORY_BYTES:
        yield Check(
            "memory",
            "warn",
            f"{free / (1 << 30):.1f} GB free: each emulated function holds torch and its part of the model",
            "end other programs, or lower --functions-concurrency",
        )
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < _LEAST_MEMORY_BYTES:
        yield Check(
            "shared memory", "warn", "/dev/shm is small", "leave --functions-parameter-store shm:// out, or enlarge it"
        )


def _check_aws() -> Iterator[Check]:
    files = (Path.home() / ".aws" / name for name in ("credentials", "config"))
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        yield Check("aws", "ok", "access keys are set")
    elif os.environ.get("AWS_PROFILE") or any(path.exists() for path in files):
        yield Check("aws", "ok", f"profile {os.environ.get('AWS_PROFILE', 'default')!r} of ~/.aws")
    else:
        mend = "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (a machine's role needs neither)"
        yield Check("aws", "warn", "no credentials in the environment and none in ~/.aws", mend)


def _check_alibaba() -> Iterator[Check]:
    if importlib.util.find_spec("alibabacloud_fc20230330") is None:
        yield Check("alibaba", "fail", "its SDK is not installed", _INSTALL)
        return
    names = ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET")
    unset = [name for name in names if not os.environ.get(name)]
    if unset:
        yield Check("alibaba", "fail", f"{' and '.join(unset)} not set", "set them where the platform is started")
    else:
        yield Check("alibaba", "ok", "access keys are set")


def _check_store(name: str, address: str, shown: str) -> Check:
    """Check the store by writing, reading and deleting a small object."""
    from springtide.storage.stores.probe import probe_store

    try:
        probed = probe_store(address)
    except SpringtideError as error:
        return Check(name, "fail", f"{shown}: {error}", "mend the address or what stands there, then ask again")
    return Check(name, "ok", f"{shown}: put {probed.put_s * 1000:.0f} ms, get {probed.get_s * 1000:.0f} ms")


def _check_parameters(address: str, shown: str) -> Check:
    """Check the parameter store, or what starts one for each job."""
    from springtide.backends.functions.parameter_store.address import parse_hosted
    from springtide.backends.functions.parameter_store.host_process import MEND_OF_MISSING_BINARY

    try:
        hosted = parse_hosted(address)
        if hosted is None:
            return _check_store("parameters", address, shown)
    except InvalidRequest as error:
        return Check("parameters", "fail", str(error))
    if hosted.kind == "redis":
        binary = hosted.options.get("binary") or "redis-server"
        program = shutil.which(binary)
        if program is None:
            mend = str(InvalidSetting(*MEND_OF_MISSING_BINARY))
            return Check("parameters", "fail", f"there is no {binary} on this machine", mend)
        return Check("parameters", "ok", f"{program} is started for each job that synchronises")
    return Check("parameters", "ok", f"a task of {hosted.path} on ECS is started for each job that synchronises")


def _available_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else None
