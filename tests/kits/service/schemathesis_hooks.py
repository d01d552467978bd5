"""What the description of the API says in words alone, for schemathesis.

A source is Python, a folder is one of the platform's machine, and no schema compares two fields: bounds are in order, a
profile has one entry for each memory size, a tensor as many values as its shape. What was drawn to be accepted is put
in order before it is sent; what is to be refused is sent as it is.
"""

from __future__ import annotations

import math
import os
from typing import Any

import schemathesis
from hypothesis import strategies
from schemathesis import Case, HookContext

from springtide.core.workload import MAX_VIRTUAL_SHARDS

SOURCES = (
    "def fit(ctx):\n    pass\n",
    "class Echo:\n    def predict(self, x: int) -> int:\n        return x\n",
    "x = 1\n",
)
# Of what the platform under test has, beside what is drawn.
KNOWN = {"name": os.environ.get("KNOWN_NAME", ""), "sha256": os.environ.get("KNOWN_SHA256", "")}
PAIRS = (("min_workers", "max_workers"), ("min_replicas", "max_replicas"), ("minimum", "maximum"))
JsonObject = dict[str, Any]

schemathesis.openapi.format("python", strategies.sampled_from(SOURCES))
schemathesis.openapi.format("python-name", strategies.sampled_from(("", "fit", "Echo", "größe")))
schemathesis.openapi.format("directory", strategies.sampled_from(("", "/", "/tmp")))


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: JsonObject) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.path == "/v1/contents":
        # A msgpack map, without any content.
        case.body = b"\x80"
    if not isinstance(case.body, dict):
        return
    body = case.body
    order(body, *PAIRS[2])
    if isinstance(body.get("source"), dict):
        # A folder is one whose contents were sent before.
        body["source"].pop("folder", None)
    if isinstance(release := body.get("release"), dict):
        # Rules are a text of their own, and judge a canary alone.
        release["watch"] = "p99<200ms,errors<1%" if release.get("canary") else ""
    options = body.get("options")
    if isinstance(options, dict):
        put_in_order(options)
        if case.path.startswith("/v1/services") and not isinstance(options.get("share"), dict):
            # Several devices of each of which a replica holds nothing.
            options.pop("devices_each", None)
    if case.path.endswith("/infer"):
        for tensor in body["inputs"]:
            # What remains is the values; the shape follows from them.
            least = {"BYTES": "", "BOOL": True}.get(tensor["datatype"], 0)
            tensor["data"] = [value for value in tensor["data"] if not isinstance(value, list)] or [least]
            tensor["shape"] = [len(tensor["data"])]


def put_in_order(options: JsonObject) -> None:
    """The options of a job or a service, so that they fit together."""
    if options.get("deadline_s") is None:
        options.pop("confidence", None)
    for low, high in PAIRS[:2]:
        if low in options or high in options:
            options.setdefault(low, 1 if low == "min_workers" else 0)
            options.setdefault(high, max(1, options[low]))
            order(options, low, high)
    share = options.get("share")
    if isinstance(share, dict):
        order(share, "request", "limit")
    profile = options.get("layer_profile")
    if isinstance(profile, dict):
        cut_to_one_length(profile)
    if options.get("on") == "functions":
        # None of the sources is declared in parts that can be cut into stages.
        options.pop("on")
    for place in ("env", "secrets"):
        if isinstance(options.get(place), dict):
            options[place] = variables(place, options[place])
    if options.get("requirements"):
        options["requirements"] = ["tqdm"]
    if options.get("python"):
        options["python"] = "/usr/bin/python3"
    put_batch_in_order(options)


def variables(place: str, drawn: JsonObject) -> JsonObject:
    """As many variables with names that may be set, the values without NUL and half surrogates, each once."""
    texts = (text.replace("\0", "").encode(errors="ignore").decode()[:100] for text in drawn.values())
    return {f"{place.upper()}_{number}": text for number, text in enumerate(texts)}


def order(values: JsonObject, low: str, high: str) -> None:
    if values.get(low) is not None and values.get(high) is not None:
        values[low], values[high] = sorted((values[low], values[high]))
        # The least that the higher one may be.
        values[high] = max(values[high], 1) if isinstance(values[high], int) else values[high]


def put_batch_in_order(options: JsonObject) -> None:
    batch, most_workers = options.get("batch"), options.get("max_workers", 1)
    if isinstance(batch, dict):
        order(batch, "min_size", "max_size")
        low, high = batch["min_size"], batch["max_size"]
        if low < high:
            options["global_batch_size"] = min(max(options.get("global_batch_size", low), low), high)
            fair_share = high // options.get("min_workers", 1)
            if batch.get("max_local_size") is not None:
                batch["max_local_size"] = max(batch["max_local_size"], math.ceil(high / MAX_VIRTUAL_SHARDS))
                fair_share = min(fair_share, batch["max_local_size"])
            batch["min_local_size"] = max(1, min(batch.get("min_local_size", 1), fair_share))
            if fair_share == 0:
                options["min_workers"] = 1
        else:
            options |= {"batch": None, "global_batch_size": low}
    if not isinstance(options.get("batch"), dict) and "length_unit" in options:
        options["length_unit"] = "samples"
    shards = options.get("num_virtual_shards")
    if shards is not None and (shards < most_workers or isinstance(options.get("batch"), dict)):
        options["num_virtual_shards"] = MAX_VIRTUAL_SHARDS


def cut_to_one_length(profile: JsonObject) -> None:
    """As many entries everywhere as the shortest list has, the memory sizes ascending, each once."""
    sizes = sorted(set(profile["memory_mb"]))
    times = [layer[key] for layer in profile["layers"] for key in ("forward_s", "backward_s")]
    profile["micro_batch_size"] = 1
    count = min(len(sizes), len(profile["bytes_per_s"]), *(len(listed) for listed in times))
    profile["memory_mb"] = sizes[:count]
    for listed in (profile["bytes_per_s"], *times):
        del listed[count:]
    for listed in times:
        # A layer that fits nowhere has no time.
        listed[:] = [1.0 if time_s is None else time_s for time_s in listed]


@schemathesis.hook
def map_path_parameters(context: HookContext, path_parameters: JsonObject | None) -> JsonObject | None:
    """Half of the names that are drawn become one that the platform knows."""
    if path_parameters is None:
        return None
    drawn = str(path_parameters.get("name", ""))
    if drawn.isalnum() and drawn.isascii() and drawn.islower() and len(drawn) < 64 and len(drawn) % 2 == 0:
        return path_parameters | {key: value for key, value in KNOWN.items() if key in path_parameters}
    return path_parameters
