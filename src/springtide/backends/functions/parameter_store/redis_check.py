"""Checks whether a permanent Redis is suitable as the parameter store of jobs on functions."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from springtide.backends.functions.parameter_store.redis_ping import RedisRefusal, ask
from springtide.backends.functions.provider import AccountFinding, one_line

LEAST_VERSION = (6, 2)
_LIMIT_S = 5.0
_MB = 1 << 20


def examine_redis(url: str) -> list[AccountFinding]:
    """Check a Redis: whether it lets us in, is new enough, takes writes, and evicts nothing."""
    parts = urlsplit(url)
    where = f"the Redis at {parts.hostname}:{parts.port or 6379}"
    try:
        facts = _facts(ask(url, ["INFO"], _LIMIT_S))
    except RedisRefusal as error:
        return [_refused(where, str(error), has_password=parts.password is not None)]
    except (OSError, ValueError) as error:
        told = f"{where} does not answer from here: {one_line(error)}"
        mend = "ask from where it can be reached; whether the control plane reaches it, its log says"
        return [AccountFinding(verdict="warn", text=told, mend=mend)]
    faults = _faults(where, facts)
    if faults:
        return faults
    limit = int(facts.get("maxmemory", "0") or 0)
    holds = f"{limit // _MB} MB" if limit else "all the memory there is"
    policy = facts.get("maxmemory_policy", "?")
    return [AccountFinding(verdict="ok", text=f"{where}: version {facts['redis_version']}, holds {holds} ({policy})")]


def _refused(where: str, error: str, *, has_password: bool) -> AccountFinding:
    code = error.partition(" ")[0]
    if code in ("NOAUTH", "WRONGPASS"):
        told = f"{where} {'does not take the password' if has_password else 'wants a password'} ({code})"
        return AccountFinding(
            verdict="fail", text=told, mend="put its password into the Secret store_secret as REDIS_PASSWORD"
        )
    if code == "NOPERM":
        told = f"{where} does not say who it is ({error})"
        return AccountFinding(
            verdict="warn", text=told, mend="allow the user +info, to have version and memory policy looked at"
        )
    return AccountFinding(verdict="fail", text=f"{where} refuses: {error}", mend="mend it, or name another one")


def _faults(where: str, facts: dict[str, str]) -> list[AccountFinding]:
    """What would keep a job from finishing."""
    found = []
    version = facts.get("redis_version", "")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        told = f"{where} does not say its version"
        found.append(AccountFinding(verdict="fail", text=told, mend="use a Redis of version 6.2 or newer"))
    elif (int(numbers[1]), int(numbers[2])) < LEAST_VERSION:
        told = f"{where} is of version {version}, which cannot let many wait for one value"
        found.append(AccountFinding(verdict="fail", text=told, mend="use version 6.2 or newer"))
    if facts.get("redis_mode") == "cluster":
        told = f"{where} is one of a cluster's, and has a part of the keys only"
        found.append(AccountFinding(verdict="fail", text=told, mend="use a single server (cluster mode off)"))
    if facts.get("role") == "slave":
        told = f"{where} is a replica, which takes no writes"
        found.append(
            AccountFinding(verdict="fail", text=told, mend=f"name the one that it follows: {facts.get('master_host')}")
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        # A function would wait for ever for a value that was evicted before it was read.
        told = f"{where} throws values away when it is full (maxmemory-policy {policy}), whether they were read or not"
        found.append(
            AccountFinding(verdict="fail", text=told, mend="set maxmemory-policy noeviction (CONFIG SET, or its file)")
        )
    return found


def _facts(text: str) -> dict[str, str]:
    """The lines `name:value` of an INFO."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))
