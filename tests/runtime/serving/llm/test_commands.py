"""The commands of engines that listen on a port, and what is read of what they say of their caches."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.commands import CAPACITY, LlamaCppOptions, engine_command
from springtide.serving.llm_settings import LlmSettings


def put_program(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return str(program)


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlmSettings:
    """A file in GGUF, on a machine without engines."""
    path = tmp_path / "story.gguf"
    path.touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return LlmSettings(name="chat", model=str(path), engine="llama.cpp", context=512, cache_mb=7)


def without_xllamacpp(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else found(name))


def test_llama_cpp_has_room_for_the_context_of_each_request(story: LlmSettings) -> None:
    program, _, module, text = engine_command(story, 21_000, 3)
    assert (program, module) == (sys.executable, "springtide.runtime.serving.llm.llama_cpp_server")
    options = msgspec.json.decode(text, type=LlamaCppOptions)
    assert (options.port, options.num_slots, options.context, options.cache_mb) == (21_000, 3, 512, 7)
    assert options.num_threads == 3, "as many as the replica may use"


def test_the_program_of_llama_cpp_is_used_where_the_library_is_not(story, tmp_path, monkeypatch) -> None:
    without_xllamacpp(monkeypatch)
    with pytest.raises(InvalidRequest, match=r"pip install 'springtide\[llamacpp\]', or put llama-server on PATH"):
        engine_command(story, 21_000, 3)
    put_program(tmp_path, "llama-server", monkeypatch)
    words = engine_command(story, 21_000, 3)
    pairs = dict(itertools.pairwise(words))
    assert words[0] == "llama-server"
    assert (pairs["--ctx-size"], pairs["--parallel"], pairs["--cache-ram"]) == ("1536", "3", "7")
    assert (pairs["--model"], pairs["--alias"], pairs["--port"]) == (story.model, "chat", "21000")
    assert pairs["--threads"] == "3"


def test_a_file_that_replicas_do_not_see_is_named(story: LlmSettings) -> None:
    Path(story.model).unlink()
    with pytest.raises(InvalidRequest, match=r"no file .* where replicas run"):
        engine_command(story, 21_000, 3)


def test_the_options_become_those_of_vllm(story, tmp_path, monkeypatch) -> None:
    chat = LlmSettings(name="chat", model="qwen/small", engine="vllm")
    with pytest.raises(InvalidRequest, match="needs the program `vllm`, which is not installed where replicas run"):
        engine_command(chat, 21_000, 64)
    program = put_program(tmp_path, "vllm", monkeypatch)
    usual = [program, "serve", "qwen/small", "--host", "127.0.0.1", "--port", "21000", "--served-model-name"]
    usual += ["chat", "qwen/small", "small", "--max-num-seqs", "64"]
    assert engine_command(chat, 21_000, 64) == usual
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    more = ["--max-model-len", "512", "--kv-cache-memory-bytes", str(8 << 20), "--tensor-parallel-size", "2"]
    assert engine_command(msgspec.structs.replace(chat, context=512, cache_mb=8), 21_000, 64) == usual + more


def test_engines_say_how_much_of_prompts_they_keep() -> None:
    props = b'{"default_generation_settings": {"n_ctx": 512, "params": {}}, "total_slots": 4}'
    assert CAPACITY["llama.cpp"].tokens_in(props) == 2048
    line = (
        b'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",'
        b'enable_prefix_caching="%b",num_gpu_blocks="573"} 1.0\n'
    )
    assert CAPACITY["vllm"].tokens_in(line % b"True") == 9168
    assert CAPACITY["vllm"].tokens_in(line % b"False") == 0
    for engine, body in (("llama.cpp", b"[]"), ("llama.cpp", b"{}"), ("vllm", b""), ("vllm", b"<html>")):
        with pytest.raises((ValueError, LookupError)):
            CAPACITY[engine].tokens_in(body)
