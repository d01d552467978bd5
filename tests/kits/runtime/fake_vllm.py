"""A named double of the program `vllm` at its wire, for machines without a GPU: it writes no answers."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
names = words[words.index("--served-model-name") + 1 : words.index("--max-num-seqs")]
CACHE = 'vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",num_gpu_blocks="64"}} 1.0\\n'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        models = {{"object": "list", "data": [{{"id": name, "object": "model", "created": 1, "owned_by": "vllm"}}
                                             for name in names], "words": words}}
        bodies = {{"/health": "", "/metrics": CACHE, "/v1/models": json.dumps(models)}}
        body = bodies.get(self.path, "").encode()
        self.send_response(200 if self.path in bodies else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass


ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def write_fake_vllm(folder: Path) -> Path:
    """Write the program into a folder for PATH, and return the folder."""
    folder.mkdir()
    program = folder / "vllm"
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return folder
