"""llama.cpp's server as the process that a replica starts: the real one, with a tiny model."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import msgspec
import pytest

from kits.runtime.tiny_gguf import write_tiny_gguf
from springtide.runtime.serving.llm.commands import CAPACITY, LlamaCppOptions
from springtide.runtime.serving.processes.ports import held_port

pytestmark = pytest.mark.slow


def started(model: Path, port: int) -> subprocess.Popen[bytes]:
    options = LlamaCppOptions(
        name="chat", model=str(model), port=port, num_slots=2, context=256, cache_mb=1, num_threads=1
    )
    module = "springtide.runtime.serving.llm.llama_cpp_server"
    return subprocess.Popen([sys.executable, "-m", module, msgspec.json.encode(options).decode()])


def test_it_serves_by_the_options_and_ends_by_sigterm(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with held_port() as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        process = started(model, port)
        try:
            is_ready = False
            while not is_ready and process.poll() is None:
                time.sleep(0.05)
                with contextlib.suppress(httpx2.TransportError):
                    is_ready = client.get("/health").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == "chat"
            assert CAPACITY["llama.cpp"].tokens_in(client.get("/props").content) == 2 * 256
            assert client.get("/slots").status_code == 501, "it would show the prompts of others"
            assert client.get("/").status_code == 404
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM


def test_a_file_that_is_no_model_ends_it_with_a_sentence(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF and no more")
    with held_port() as port:
        assert started(model, port).wait(60) == 1
