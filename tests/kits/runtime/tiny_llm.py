"""A language model of a few thousand random weights, with a tokenizer made on the spot: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

_TEXT = ["hello world, the quick brown fox jumps over the lazy dog"] * 3
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_llm(folder: Path, *, hidden: int = 64, layers: int = 2, context: int = 512) -> Path:
    """Write a Llama with seeded weights in transformers' form, and return its folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    whole.chat_template = _TEMPLATE
    whole.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(whole),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
