"""The engines that listen on a port: what starts each of them, and how much of prompts it says that it keeps."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.serving.applications import EngineCapacity
from springtide.serving.llm_settings import LLAMA_CPP_CONTEXT, EngineName, LlmSettings

HOST = "127.0.0.1"
READY_PATH = "/health"
# Of llama.cpp: warnings and errors, and no lines of each request.
VERBOSITY = 2
# MiB for prompts that no stream uses; llama.cpp itself takes 8192.
_LLAMA_CPP_CACHE_MB = 1024
_MIB = 1 << 20
_LLAMA_SERVER = "llama-server"
_VLLM_CACHE = "vllm:cache_config_info"


class LlamaCppOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a server of llama.cpp is started with.

    `num_slots` answers are written at a time, each with room for `context` tokens. `cache_mb`: MiB for prompts that no
    slot holds any more. `num_threads` None: chosen by llama.cpp.
    """

    name: str
    model: str
    port: int
    num_slots: int
    context: int
    cache_mb: int
    num_threads: int | None


class _SlotSettings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    """Of what a server of llama.cpp says of itself."""

    total_slots: int
    default_generation_settings: _SlotSettings


def engine_command(settings: LlmSettings, port: int, concurrency: int) -> list[str]:
    """The command of the engine of `settings`, for this machine. Raises InvalidRequest if it is not installed."""
    return _vllm(settings, port, concurrency) if settings.engine == "vllm" else _llama_cpp(settings, port, concurrency)


def _llama_cpp_capacity(body: bytes) -> int:
    """The tokens that the slots of a server of llama.cpp keep together. Raises ValueError."""
    told = decode_json(body, _Props)
    return told.total_slots * told.default_generation_settings.n_ctx


def _vllm_capacity(body: bytes) -> int:
    """The tokens that vLLM's blocks keep; 0 where it shares no beginnings. Raises ValueError or KeyError."""
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.name == _VLLM_CACHE:
                blocks = int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
                return blocks if sample.labels["enable_prefix_caching"] == "True" else 0
    raise KeyError(_VLLM_CACHE)


def _llama_cpp(settings: LlmSettings, port: int, concurrency: int) -> list[str]:
    if not Path(settings.model).is_file():
        raise InvalidRequest(f"there is no file {settings.model!r:.200} where replicas run")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    options = LlamaCppOptions(
        name=settings.name,
        model=settings.model,
        port=port,
        num_slots=concurrency,
        context=settings.context or LLAMA_CPP_CONTEXT,
        cache_mb=settings.cache_mb or _LLAMA_CPP_CACHE_MB,
        # Threads of llama.cpp wait by spinning: more than the cores that the replica may use would make it slow.
        num_threads=int(threads) if threads.isdecimal() else None,
    )
    if importlib.util.find_spec("xllamacpp") is not None:
        module = "springtide.runtime.serving.llm.llama_cpp_server"
        return [sys.executable, "-m", module, msgspec.json.encode(options).decode()]
    if shutil.which(_LLAMA_SERVER) is not None:
        return _llama_server(options)
    raise InvalidRequest(
        "the engine llama.cpp needs xllamacpp, which is not installed where replicas run: pip install "
        f"'springtide[llamacpp]', or put {_LLAMA_SERVER} on PATH"
    )


def _llama_server(options: LlamaCppOptions) -> list[str]:
    """The command of llama.cpp's own program."""
    words = [_LLAMA_SERVER, "--model", options.model, "--alias", options.name, "--host", HOST]
    words += ["--port", str(options.port), "--parallel", str(options.num_slots), "--no-kv-unified"]
    words += ["--ctx-size", str(options.context * options.num_slots), "--cache-ram", str(options.cache_mb)]
    if options.num_threads is not None:
        words += ["--threads", str(options.num_threads)]
    # Slots would show the prompts of others.
    return [*words, "--no-slots", "--no-webui", "--jinja", "--log-verbosity", str(VERBOSITY)]


def _vllm(settings: LlmSettings, port: int, concurrency: int) -> list[str]:
    # Beside the replica's Python first, as the command will be looked for.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (program := shutil.which("vllm", path=path)) is None:
        raise InvalidRequest(
            "the engine vllm needs the program `vllm`, which is not installed where replicas run; install vllm in the "
            "platform's environment (it needs a GPU that it supports), or choose another engine"
        )
    words = [program, "serve", settings.model, "--host", HOST, "--port", str(port)]
    # The first name is that of answers.
    words += ["--served-model-name", *dict.fromkeys((settings.name, settings.model, Path(settings.model).name))]
    words += ["--max-num-seqs", str(concurrency)]
    if settings.context is not None:
        words += ["--max-model-len", str(settings.context)]
    if settings.cache_mb is not None:
        words += ["--kv-cache-memory-bytes", str(settings.cache_mb * _MIB)]
    devices = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(devices) > 1:
        words += ["--tensor-parallel-size", str(len(devices))]
    return words


CAPACITY: Final[dict[EngineName, EngineCapacity]] = {
    "llama.cpp": EngineCapacity("/props", _llama_cpp_capacity),
    "vllm": EngineCapacity("/metrics", _vllm_capacity),
}
