"""llama.cpp's server as a process of its own, by xllamacpp, run as a module.

Its one argument is LlamaCppOptions as JSON. It ends by SIGTERM, or with exit code 1 if the model cannot be loaded.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

from springtide.core.decoding import decode_json
from springtide.runtime.serving.llm.commands import HOST, VERBOSITY, LlamaCppOptions

# Comments in a stream that is silent, so that nothing between takes it for dead.
_COMMENT_EVERY_S = 5


def main(options: LlamaCppOptions) -> int:
    """Serve until a signal ends the process."""
    given = xllamacpp.CommonParams()
    given.model.path = options.model
    given.model_alias = {options.name}
    given.hostnames = [HOST]
    given.port = options.port
    given.n_parallel = options.num_slots
    given.n_ctx = options.context * options.num_slots
    given.kv_unified = False
    given.cache_ram_mib = options.cache_mb
    given.sse_ping_interval = _COMMENT_EVERY_S
    # A page of its own would not work below /f/NAME, and slots would show the prompts of others.
    given.ui = given.endpoint_slots = False
    given.verbosity = VERBOSITY
    if options.num_threads is not None:
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = options.num_threads
    try:
        server = xllamacpp.Server(given)
    except RuntimeError as error:
        sys.stderr.write(f"llama.cpp cannot serve {options.model}: {error}\n")
        return 1
    sys.stderr.write(f"llama.cpp serves {options.name} at {server.listening_address}\n")
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(decode_json(sys.argv[1], LlamaCppOptions)))
