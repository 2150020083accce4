"""Helpers for the engine tests.

They provide tiny random models, reference outputs of transformers, and a monitor of forward passes.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.engines.torch import TorchEngine
from crl.types import Sampling

V = 48
NEVER = (1_000_000,)  # stop token that no model in these tests can sample


def qwen2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    config = Qwen2Config(**{
        "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 4096,
        "initializer_range": 0.25, "tie_word_embeddings": False, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None,
    } | changes)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(V) for _ in range(length)) for length in lengths]


@asynccontextmanager
async def serving(
    model: PreTrainedModel, *, max_batch: int = 8, max_context: int = 4096, version: int = 0
) -> AsyncIterator[TorchEngine]:
    """Yield an engine. The test fails if it takes more than 60 s, so that it cannot hang."""
    engine = TorchEngine(model, max_batch=max_batch, max_context=max_context, version=version)
    try:
        async with asyncio.timeout(60):
            yield engine
    finally:
        await engine.aclose()


def reference(
    model: PreTrainedModel, prompt: Sequence[int], tokens: int, stop: Sequence[int] = NEVER
) -> tuple[int, ...]:
    """Return the tokens that transformers samples greedily for a single prompt.

    This engine's cache is not used.
    """
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=list(stop),
        pad_token_id=0,
    )  # pyright: ignore[reportCallIssue]
    return tuple(out[0, len(prompt) :].tolist())


@torch.no_grad()
def true_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-probs of `sampled` after `prompt`, from one plain forward pass."""
    ids = torch.tensor([[*prompt, *sampled]])
    log_p = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    return [float(log_p[len(prompt) + i - 1, token]) for i, token in enumerate(sampled)]


class Passes:
    """Monitor of a model's forward passes.

    It can block the compute thread before a pass, or run an action there. `read` holds the number
    of new tokens of each row, pass by pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.read: list[tuple[int, ...]] = []
        self._go = threading.Event()
        self._held = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._actions: dict[int, Callable[[], None]] = {}
        model.base_model.register_forward_pre_hook(self._before, with_kwargs=True)

    def at(self, number: int, action: Callable[[], None]) -> None:
        self._actions[number] = action

    def hold(self, number: int) -> None:
        """Make pass `number` (from 0) wait for `go`."""
        self.at(number, self._wait)

    async def held(self) -> None:
        await self._held.wait()
        self._held.clear()

    def go(self) -> None:
        self._go.set()

    def _wait(self) -> None:
        self._loop.call_soon_threadsafe(self._held.set)
        assert self._go.wait(60)
        self._go.clear()

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        number = len(self.read)
        rows, width = (args[0] if args else kwargs["input_ids"]).shape
        self.read.append(
            tuple(kwargs["forward_pass"].lengths) if "forward_pass" in kwargs else (width,) * rows
        )
        self._actions.get(number, lambda: None)()


async def settled() -> None:
    """Let every task run until it waits for something."""
    for _ in range(5):
        await asyncio.sleep(0)


def greedy(tokens: int, stop: Sequence[int] = NEVER) -> Sampling:
    return Sampling(tokens, tuple(stop), temperature=0)
