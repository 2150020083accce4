"""Decoding of the actor: its completions in episodes and in critiques."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from crl.manager.calls import CallClock
from crl.modeling.tokens import ChatRenderer
from crl.rollout.turnstile import Turnstile
from crl.rollout.waves import Sampler
from crl.seeds import derive_seed
from crl.types import Completion, Sampling


@dataclass(frozen=True)
class Decoding:
    """Decoding of one model: sampler, renderer, and the settings of every completion."""

    sampler: Sampler
    """Access to the engine."""
    renderer: ChatRenderer
    """Renderer of the model's prompts."""
    max_context: int
    """Maximal tokens of one sequence, prompt and completion together."""
    temperature: float
    """Sampling temperature; 0 is greedy decoding."""
    seed: int
    """Root of all sampling draws."""
    top_p: float = 1.0
    """Probability mass that is kept, as in `Sampling`."""
    top_k: int = 0
    """Number of tokens that are kept, as in `Sampling`."""
    turnstile: Turnstile = field(default_factory=Turnstile)
    """Turnstile that episodes pass after the reset and after every completion."""

    @cached_property
    def clock(self) -> CallClock:
        """Clock of the completions. A copy with other settings has one of its own."""
        return CallClock()

    async def complete(
        self, prompt: Sequence[int], max_tokens: int, *, session: str,
        draw: tuple[str, *tuple[str | int, ...]],
    ) -> Completion | None:  # fmt: skip
        """Sample a completion of `prompt` with at most `max_tokens` tokens.

        Return None if the prompt fills the context. `draw` is the address of the random draw.
        """
        remaining_tokens = self.max_context - len(prompt)
        if remaining_tokens < 1:
            return None
        sampling = Sampling(
            min(max_tokens, remaining_tokens),
            self.renderer.stop_ids,
            self.temperature,
            self.top_p,
            self.top_k,
        )
        seed = derive_seed(self.seed, *draw)
        with self.clock():
            return await self.sampler.generate(prompt, sampling, session=session, rng=seed)
