"""Perplexity-reduction reward: prompts that are scored, entropies, and the bonus of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from crl.config.schema import PerplexitySection
from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError
from crl.rollout.episode import EpisodeKey, Limits
from crl.rollout.perplexity import PerplexityReward, query_prompts
from crl.types import Condition, ExperienceUse, RolloutPlan, Segment, Trajectory, UseKind
from support.doors import TASK, RecordingRetriever, open_host, renderer, runner, script
from support.trajectories import build_trajectory

GOAL = Segment("user", "Open it.", "task")
OBSERVATION = Segment("user", "You see a door.", "env")
OFFER = Segment("user", "You may ask.", "tool_spec")
ANSWER = Segment("assistant", "open", "policy")
LATER = Segment("user", "It opens.", "env")


def experience(text: str) -> Segment:
    return Segment("user", text, "experience")


def episode(
    member: int, *opening: Segment, how: UseKind = "start", error: str | None = None
) -> Trajectory:
    """Return an episode with an experience, if one is in its opening or if it asked for one."""
    shown = tuple(s.text for s in opening if s.origin == "experience")
    shown = shown or (() if how == "start" else ("Push.",))
    used = tuple(ExperienceUse("m", 1, "g", how) for _ in shown)
    condition: Condition = "guided" if used else "free"
    segments = (*opening, ANSWER, LATER, ANSWER)
    return build_trajectory(
        TASK, 3, 7, member, condition, segments=segments, used=used, shown=shown, error=error
    )


class EntropyEngine(ScriptedEngine):
    """Engine whose actor is less uncertain after some texts.

    The log-prob of the last `tokens` tokens of a prompt is minus the entropy of the first text in
    the prompt; that of all other tokens is −99.
    """

    def __init__(self, tokens: int, entropies: dict[str, float]) -> None:
        super().__init__(renderer(), lambda prompt: "open")
        self.tokens, self.entropies = tokens, entropies
        self.scored: list[str] = []
        self.error: Exception | None = None

    async def score(self, ids: Sequence[int]) -> list[float]:
        if self.error:
            raise self.error
        prompt = self._renderer.decode(ids)
        self.scored.append(prompt)
        entropy = next(value for text, value in self.entropies.items() if text in prompt)
        return [-99.0] * (len(ids) - 1 - self.tokens) + [-entropy] * self.tokens


def test_prompts_differ_by_the_experience_alone() -> None:
    chat = renderer()
    prompts = query_prompts(chat, episode(0, GOAL, experience("Push."), OFFER, OBSERVATION))
    assert prompts
    assert prompts.guided == chat.encode(chat.text([GOAL, experience("Push."), OFFER, OBSERVATION]))
    assert prompts.free == chat.encode(chat.text([GOAL, OFFER, OBSERVATION]))
    query = prompts.free[-prompts.tokens :]
    assert query == prompts.guided[-prompts.tokens :]
    assert chat.decode(query).lstrip().startswith("You see a door."), "not goal, offer, experience"


async def test_the_guided_prompt_is_the_prompt_that_the_actor_received() -> None:
    engine = ScriptedEngine(renderer(), script("wait", "open"))
    limits = {"doors": Limits(max_turns=3, max_response_tokens=32)}
    async with open_host() as hosted:
        play = runner(engine, hosted.host, limits=limits, retriever=RecordingRetriever()).play
        guided = await play(EpisodeKey("train", 2, 5, 0), TASK, RolloutPlan("guided"))
        free = await play(EpisodeKey("train", 2, 5, 1), TASK, RolloutPlan("free"))
    first_prompts = [engine.requests[0][1], engine.requests[2][1]]
    prompts = query_prompts(renderer(), guided)
    assert prompts
    assert [prompts.guided, prompts.free] == first_prompts
    assert query_prompts(renderer(), free) is None


def test_an_experience_with_the_last_words_of_the_goal_adds_no_tokens_to_the_query() -> None:
    one, other = (
        query_prompts(renderer(), episode(0, GOAL, experience(text), OBSERVATION))
        for text in ("Push.", "Do Open it.")
    )
    assert one
    assert other
    assert one.tokens == other.tokens


@pytest.mark.parametrize(
    "opening",
    [(GOAL, OBSERVATION), (GOAL, OBSERVATION, experience("Push."))],
    ids=["no experience", "nothing after the experience"],
)
def test_openings_without_experience_or_query_are_not_measured(opening: tuple[Segment]) -> None:
    assert query_prompts(renderer(), episode(0, *opening)) is None


async def test_bonuses_of_a_group_by_hand() -> None:
    """Compare the bonuses of a group, with H(q) = 2, H(q, Push) = 1.5 and H(q, Dig) = 3.

    The bonus is w·Δ / H(q) with w = 0.4: 0.4 · 0.5 / 2 and 0.4 · −1 / 2.
    """
    push, dig = (experience(text) for text in ("Push.", "Dig."))
    batch = [
        episode(0, GOAL, push, OBSERVATION),
        episode(1, GOAL, dig, OBSERVATION),
        episode(2, GOAL, push, OBSERVATION),
        episode(3, GOAL, push, OBSERVATION, error="env: lost"),
        episode(4, GOAL, OBSERVATION, how="ask"),
        episode(5, GOAL, OBSERVATION),
    ]
    prompts = query_prompts(renderer(), batch[0])
    assert prompts
    engine = EntropyEngine(prompts.tokens, {"Push.": 1.5, "Dig.": 3.0, "Open it.": 2.0})
    reward = PerplexityReward(engine, renderer(), PerplexitySection(weight=0.4))
    bonuses = await reward.bonuses(batch)
    assert bonuses == {
        batch[0].address: pytest.approx(0.1),
        batch[1].address: pytest.approx(-0.2),
        batch[2].address: pytest.approx(0.1),
    }
    assert len(engine.scored) == 3, "equal prompts are scored once"
    metrics = reward.take_metrics()
    assert metrics.pop("time/perplexity") > 0
    assert metrics == pytest.approx(
        {
            "perplexity/episodes": 3,
            "perplexity/failed": 0,
            "perplexity/reduction": 0.0,
            "perplexity/bonus": 0.0,
        }
    )
    assert reward.take_metrics() == {
        "perplexity/episodes": 0,
        "perplexity/failed": 0,
        "time/perplexity": 0.0,
    }


async def test_the_settings_reach_the_bonus() -> None:
    batch = [episode(0, GOAL, experience("Dig."), OBSERVATION)]
    prompts = query_prompts(renderer(), batch[0])
    assert prompts
    engine = EntropyEngine(prompts.tokens, {"Dig.": 3.0, "Open it.": 2.0})
    sections = {
        -0.2: {"normaliser": "asymmetric"},  # the default clip
        -0.3: {"normaliser": "asymmetric", "clip_low": 0.3},
        -0.46211716: {"normaliser": "sigmoid"},  # 2σ(−1) − 1
        -0.24491866: {"normaliser": "sigmoid", "temperature": 2.0},  # 2σ(−0.5) − 1
    }
    for expected, settings in sections.items():
        section = PerplexitySection.model_validate({"weight": 1.0, **settings})
        reward = PerplexityReward(engine, renderer(), section)
        assert await reward.bonuses(batch) == {batch[0].address: pytest.approx(expected)}


async def test_prompts_that_cannot_be_scored_earn_no_bonus() -> None:
    batch = [episode(0, GOAL, experience("Push."), OBSERVATION)]
    engine = EntropyEngine(1, {"": 1.0})
    reward = PerplexityReward(engine, renderer(), PerplexitySection(weight=0.4))
    engine.error = RolloutError("engine", "too long")
    assert await reward.bonuses(batch) == {}
    metrics = reward.take_metrics()
    assert (metrics["perplexity/episodes"], metrics["perplexity/failed"]) == (0, 1)
    engine.error = EngineError("the engine is gone")
    with pytest.raises(EngineError, match="the engine is gone"):
        await reward.bonuses(batch)
