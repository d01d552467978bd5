"""What `st.llm` declares, and the file that its replicas import."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import springtide as st
from springtide.cli.loading import find_service
from springtide.client.llm.declaration import is_language_model
from springtide.core.errors import InvalidRequest
from springtide.serving.applications import EngineService
from springtide.serving.schema import derive_schema


def test_a_model_stands_for_its_application_with_the_options_of_a_service(tmp_path):
    (tmp_path / "model").mkdir()
    chat = st.llm("chat", model=tmp_path / "model", context=256, scale=(0, 2))
    assert (chat.name, chat.options.values["concurrency"], chat.options.values["scale"]) == ("chat", 16, (0, 2))
    assert is_language_model(chat.cls)
    assert derive_schema(chat.cls).kind == "asgi"
    source = chat.source()
    module = types.ModuleType("made")
    exec(source.text, module.__dict__)
    again = getattr(module, source.object_name)
    assert again.cls.__doc__ == chat.cls.__doc__
    assert str(tmp_path / "model") in again.cls.__doc__
    assert again.source().text == source.text, "what replicas import declares the same"


def test_a_file_may_declare_one(tmp_path, monkeypatch):
    module = types.ModuleType("springtide_user_made")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("import springtide as st\nchat = st.llm('chat', model='some/model')", module.__dict__)
    assert find_service(module, Path("made.py"), "").name == "chat"


def test_a_file_in_gguf_is_served_by_a_command(tmp_path):
    path = tmp_path / "story.Q8_0.GGUF"
    path.touch()
    chat = st.llm("chat", model=path)
    assert (chat.options.values["concurrency"], chat.options.values["in_flight"]) == (4, 4)
    assert issubclass(chat.cls, EngineService)
    assert (chat.cls.ready, chat.cls.capacity.path) == ("/health", "/props")
    assert is_language_model(chat.cls)
    assert "engine='llama.cpp'" in chat.source().text
    assert str(path) in chat.cls.make(port=21_000, concurrency=4)[-1]


def test_vllm_is_a_command_too():
    chat = st.llm("chat", model="qwen/small", engine="vllm", concurrency=3)
    assert (chat.options.values["concurrency"], chat.cls.capacity.path) == (3, "/metrics")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "./nothing-here"}, "there is no model at"),
        ({"model": " "}, "model is empty"),
        ({"model": "a/b", "engine": "other"}, "there is: transformers, llama.cpp, vllm"),
        ({"model": "a/b", "engine": "llama.cpp"}, "takes a file that ends in .gguf"),
        ({"model": "a/b.gguf", "engine": "transformers"}, "does not take files in GGUF"),
        ({"model": "a/b.gguf", "engine": "vllm"}, "does not take files in GGUF"),
        ({"model": "a/b", "context": 2}, "context=2"),
        ({"model": "a/b", "cache_mb": 0}, "cache_mb=0"),
        ({"model": "a/b", "speed": 1}, "does not know 'speed'"),
    ],
)
def test_what_cannot_be_served_is_refused(given, why):
    with pytest.raises(InvalidRequest, match=why):
        st.llm("chat", **given)
