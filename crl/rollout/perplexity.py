"""Perplexity-reduction reward of experiences (CRL appendix B.2).

The actor scores the query of a guided episode twice: after its prompt with the experience, and
after the same prompt without it. `crl.algo.perplexity_bonus` makes the bonus from both entropies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

from crl.algo.experience import perplexity_bonus
from crl.config.schema import PerplexitySection
from crl.errors import RolloutError
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Engine
from crl.types import GUIDANCE_ORIGINS, SAMPLED_ORIGINS, EpisodeAddress, Trajectory


@dataclass(frozen=True, slots=True)
class QueryPrompts:
    """First prompt of a guided episode, with and without its experience."""

    guided: tuple[int, ...]
    """Token ids of the prompt with the experience."""
    free: tuple[int, ...]
    """Token ids of the same prompt without the experience."""
    tokens: int
    """Number of tokens of the query q. They are the last tokens of both prompts."""


def query_prompts(renderer: ChatRenderer, trajectory: Trajectory) -> QueryPrompts | None:
    """Return the prompts of an episode; None if no experience or no query is in its first prompt.

    The query consists of the segments after the guidance: the first observation. **Ours**: the
    goal comes before the experience, so the experience does not change its log-probs. The tokens
    with which the chat template opens the answer belong to the query, too.
    """
    opening = list(takewhile(lambda s: s.origin not in SAMPLED_ORIGINS, trajectory.segments))
    guidance = [i for i, segment in enumerate(opening) if segment.origin in GUIDANCE_ORIGINS]
    without = [segment for segment in opening if segment.origin != "experience"]
    if len(without) == len(opening) or guidance[-1] == len(opening) - 1:
        return None
    guided, free, query = (
        renderer.encode(renderer.text(segments))
        for segments in (opening, without, opening[guidance[-1] + 1 :])
    )
    tokens = _common_suffix(guided, free, query)
    return QueryPrompts(guided, free, tokens) if tokens else None


def _common_suffix(*sequences: Sequence[int]) -> int:
    """Return the number of last tokens that are the same in all sequences."""
    return sum(
        1
        for _ in takewhile(
            lambda tokens: len(set(tokens)) == 1, zip(*map(reversed, sequences), strict=False)
        )
    )


class PerplexityReward:
    """Measurement of the actor's entropies, and source of the bonus of each guided episode.

    The experience that guided an episode from its start is measured. Experiences that the agent
    asked for are not, because B.2 measures at the start of a task.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, settings: PerplexitySection) -> None:
        """Store the parts. `engine`: the actor's engine. `renderer`: the actor's renderer."""
        self._engine, self._renderer, self._settings = engine, renderer, settings
        self._reductions: list[float] = []
        self._bonuses: list[float] = []
        self._failed = 0
        self._seconds = 0.0

    async def bonuses(self, trajectories: Iterable[Trajectory]) -> dict[EpisodeAddress, float]:
        """Return the bonus of the experience of each guided episode, by the episode's address.

        Both entropies are those of the policy version that the engine has now. The caller must not
        publish weights meanwhile. Equal prompts are scored once. Episodes with an error, without an
        experience in the first prompt, or whose prompts cannot be scored are left out.
        """
        started = time.monotonic()
        prompts = await asyncio.to_thread(self._prompts, list(trajectories))
        unique = dict.fromkeys(ids for pair in prompts.values() for ids in (pair.free, pair.guided))
        scores = dict(zip(unique, await asyncio.gather(*map(self._score, unique)), strict=True))
        bonuses: dict[EpisodeAddress, float] = {}
        for address, pair in prompts.items():
            free, guided = scores[pair.free], scores[pair.guided]
            if free is None or guided is None:
                self._failed += 1
                continue
            entropy, guided_entropy = (_entropy(s, pair.tokens) for s in (free, guided))
            bonuses[address] = self._bonus(entropy, guided_entropy)
            self._reductions.append(entropy - guided_entropy)
        self._bonuses += bonuses.values()
        self._seconds += time.monotonic() - started
        return bonuses

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the episodes since the last call.

        They are the number of measured episodes and of those that could not be scored, the seconds,
        and, if an episode was measured, the means of Δ (nats per token) and of the bonus.
        """
        metrics: dict[str, float] = {
            "perplexity/episodes": len(self._bonuses),
            "perplexity/failed": self._failed,
            "time/perplexity": self._seconds,
        }
        if self._bonuses:
            metrics["perplexity/reduction"] = fmean(self._reductions)
            metrics["perplexity/bonus"] = fmean(self._bonuses)
        self._reductions, self._bonuses = [], []
        self._failed, self._seconds = 0, 0.0
        return metrics

    def _prompts(self, trajectories: Sequence[Trajectory]) -> Mapping[EpisodeAddress, QueryPrompts]:
        return {
            t.address: prompts
            for t in trajectories
            if t.error is None
            and any(use.how == "start" for use in t.used)
            and (prompts := query_prompts(self._renderer, t))
        }

    async def _score(self, ids: tuple[int, ...]) -> Sequence[float] | None:
        try:
            return await self._engine.score(ids)
        except RolloutError:
            return None

    def _bonus(self, entropy: float, guided_entropy: float) -> float:
        s = self._settings
        return perplexity_bonus(
            entropy, guided_entropy, s.normaliser,
            weight=s.weight, clip_low=s.clip_low, clip_high=s.clip_high, temperature=s.temperature,
        )  # fmt: skip


def _entropy(logprobs: Sequence[float], tokens: int) -> float:
    """Return the mean negative log-prob of the last `tokens` tokens, at least 0."""
    return max(0.0, -fmean(logprobs[-tokens:]))
