"""Supervised warm start: a new tokenizer and a new small model, trained on demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from crl.algo import micro_batches, nll
from crl.modeling.demonstrations import Demonstration, demonstrated_traces
from crl.modeling.loading import token_logprobs
from crl.modeling.tokens import ChatRenderer
from crl.types import TokenTrace

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


@dataclass(frozen=True)
class SupervisedSettings:
    """Settings of supervised training: AdamW with linear warm-up and linear decay."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup_updates: int = 20
    batch_tokens: int = 4096
    """Tokens of one update, padding included."""
    weight_decay: float = 0.01
    floor: float = 0.05
    """Lower bound of the decay factor of the learning rate."""
    context_weight: float = 1.0
    """Loss weight of the context tokens; the demonstrator's tokens have weight 1."""


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


def demonstrated_trace(demonstration: Demonstration, renderer: ChatRenderer) -> TokenTrace:
    """Return the demonstration as one training sample; see `demonstrated_traces`."""
    (trace,) = demonstrated_traces(demonstration, renderer)
    return trace


def train_supervised(
    model: Qwen2ForCausalLM,
    batches: Sequence[Sequence[TokenTrace]],
    settings: SupervisedSettings,
    report: Callable[[str], None],
) -> float:
    """Train the model with one update per batch.

    Return the mean negative log-likelihood over the last tenth of the updates, in nats per token.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(0.9, 0.98),
    )

    def rate_factor(update: int) -> float:
        return min(1.0, (update + 1) / settings.warmup_updates) * max(
            settings.floor, 1 - update / len(batches)
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    model.train()
    losses: list[float] = []
    for update, batch in enumerate(batches, start=1):
        losses.append(_update(model, batch, optimizer, settings.context_weight))
        schedule.step()
        if update % 50 == 0 or update == len(batches):
            report(
                f"  update {update}/{len(batches)}: "
                f"{sum(losses[-50:]) / len(losses[-50:]):.3f} nats per token"
            )
    model.eval()
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


def _update(
    model: Qwen2ForCausalLM,
    traces: Sequence[TokenTrace],
    optimizer: torch.optim.Optimizer,
    context_weight: float,
) -> float:
    """Perform one update.

    Return the mean negative log-likelihood of the demonstrators' tokens, in nats per token.
    """
    width = max(len(t.ids) for t in traces)
    ids = torch.tensor([[*t.ids, *[0] * (width - len(t.ids))] for t in traces])
    answer_mask = torch.tensor(
        [[*t.mask, *[0] * (width - len(t.ids))] for t in traces], dtype=torch.bool
    )
    context_mask = torch.tensor(
        [[0, *(1 - m for m in t.mask[1:]), *[0] * (width - len(t.ids))] for t in traces],
        dtype=torch.bool,
    )
    logp = token_logprobs(model, ids, answer_mask | context_mask).logp
    # Both losses are means over tokens.
    answer_loss, context_loss = (
        nll(logp, mask, weights=mask.sum(-1) / mask.sum())[0]
        for mask in (answer_mask, context_mask)
    )
    optimizer.zero_grad(set_to_none=True)
    (answer_loss + context_weight * context_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return answer_loss.item()


def epoch_batches(
    traces: Sequence[TokenTrace], batch_tokens: int, rng: random.Random
) -> list[list[TokenTrace]]:
    """Return batches of samples with similar length, in random order.

    The samples that share a batch differ between epochs.
    """
    order = list(range(len(traces)))
    rng.shuffle(order)
    # Random offsets mix samples of neighbouring lengths.
    noisy_lengths = [len(traces[i].ids) + rng.randrange(16) for i in order]
    batches = [
        [traces[order[i]] for i in batch]
        for batch in micro_batches(noisy_lengths, batch_tokens, padded=True)
    ]
    rng.shuffle(batches)
    return batches
