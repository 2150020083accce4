"""New small models: a tokenizer trained on demonstrations, and random weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from crl.modeling.demonstrations import Demonstration

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Shape of a Qwen2 model with tied embeddings in float32."""

    vocabulary: int = 768
    """Maximal tokens of the vocabulary; it is smaller if the text has no more merges."""
    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    """Key and value heads, each shared by heads / kv_heads query heads.

    Fewer heads make decoding faster.
    """
    intermediate: int = 192
    context: int = 1024
    """Maximal tokens of a sequence."""


def train_tokenizer(demonstrations: Iterable[Demonstration], vocabulary: int) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer trained on the demonstrations' text.

    It has a ChatML template and can encode every string. Its class and its splitting of text are
    those of Qwen2, because transformers loads the tokenizer of a Qwen2 model with this class.
    """
    texts = [segment.text for demonstration in demonstrations for segment in demonstration]
    # The chat template inserts roles with this frequency.
    roles = ["system\n", "user\n", "assistant\n"] * (len(texts) // 2)
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        [*roles, *texts],
        vocab_size=vocabulary,
        new_special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(shape: Shape, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Return a newly initialised model. The state of torch's global generator is restored."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        initializer_range=0.04,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
