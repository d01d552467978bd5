"""A language model of a few thousand random weights in GGUF, with a tokenizer of bytes: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_VOCABULARY = 300
_HEADS, _KV_HEADS = 4, 2


def write_tiny_gguf(path: Path, *, hidden: int = 64, layers: int = 2, context: int = 512) -> Path:
    """Write a Llama with seeded weights, of the sizes of `write_tiny_llm`, and return its path."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    inner, kv = 2 * hidden, hidden // _HEADS * _KV_HEADS
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(hidden // _HEADS)
    writer.add_vocab_size(_VOCABULARY)
    tokens = _add_tokenizer(writer)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0.0, 0.02, shape) if len(shape) > 1 else np.ones(shape)
        if name == "output":
            # The most probable token is always one of ASCII, which is a whole character wherever a stream is cut.
            values[[not token.isascii() or token in _SPECIAL for token in tokens]] = 0.0
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", _VOCABULARY, hidden)
    add("output_norm", hidden)
    add("output", _VOCABULARY, hidden)
    for number in range(layers):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            add(f"blk.{number}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer) -> list[str]:
    """Each byte is a token, in the alphabet of GPT-2's tokenizer; the others are never written alone."""
    import gguf
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [first + second for first in "abcdefghij" for second in "klmno"][: _VOCABULARY - 256 - len(_SPECIAL)]
    tokens = [*_SPECIAL, *alphabet, *merged]
    kinds = [gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(_SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in merged])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    return tokens
