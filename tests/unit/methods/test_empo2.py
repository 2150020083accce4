"""EMPO²: modes, the three cases of the importance ratio, the mask, novelty, stripped prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.config import load
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.envs.registry import get_spec
from crl.errors import ConfigError
from crl.learners.step import Trainer, TrainSettings
from crl.manager.keys import STATE_KEYS
from crl.methods.empo2 import Empo2Section
from crl.methods.parts import novelty as novelty_module
from crl.methods.parts.memory import MemorySteps, StrippedView
from crl.methods.parts.novelty import StateNovelty, advantage_terms, novelty_metrics
from crl.methods.parts.rollouts import ChatContext
from crl.methods.parts.training import GroupAdvantage, SurrogateLoss
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.planning import tasks
from crl.planning.context import bank_prompts
from crl.planning.methods import build_method
from crl.protocols import Advice, Hit, Question, SearchRequest
from crl.rollout.episode import EpisodeKey, Limits
from crl.rollout.rerender import Rerenderer
from crl.types import (
    BEHAVIOUR,
    STEP_START,
    Condition,
    ExperienceUse,
    Minibatch,
    Observation,
    OldPolicy,
    RolloutPlan,
    Segment,
    StreamSettings,
    TokenTrace,
    TrainSample,
    Trajectory,
)
from support.doors import RULES, TASK, open_host, renderer, runner
from support.trajectories import build_trajectory

LIMITS = {"doors": Limits(max_turns=3, max_response_tokens=32)}
ALWAYS, NEVER = MemorySteps(1.0, 0, "mode"), MemorySteps(0.0, 0, "mode")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|/turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, ()),
    "llama": (LLAMA, ("<|head|>", "<|/head|>", "<|eot|>")),
    "gemma": (GEMMA, ("<|turn|>", "<|/turn|>")),
}


class Tips:
    """`Retriever` with another tip for every request."""

    def __init__(self) -> None:
        self.requests: list[SearchRequest] = []

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        start = len(self.requests)
        self.requests += requests
        return [
            Hit(f"Mind the zebra {n}.", ExperienceUse(f"t{n}", 1, f"g{n}", "start"))
            for n in range(start, len(self.requests))
        ]

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


def family(name: str, folder: Path) -> ChatRenderer:
    """Return the renderer of a model with the chat template of a family."""
    template, control = FAMILIES[name]
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(
        [AddedToken(token, special=True) for token in control]  # pyright: ignore[reportArgumentType]
    )
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, stop_ids(folder, tokenizer))


async def episode(
    renderer: ChatRenderer,
    condition: Condition,
    tips: Tips,
    step: int = 2,
    window: int | None = None,
) -> Trajectory:
    actions = iter(("wait", "shout", "open"))
    engine = ScriptedEngine(renderer, lambda prompt: next(actions))
    limits = replace(LIMITS["doors"], advice=Advice(2, every_turn=True), window=window)
    parts = {
        "limits": {"doors": limits},
        "retriever": tips, "renderer": renderer,
        "context": ChatContext({"doors": RULES}, state=STATE_KEYS["state"]),
    }  # fmt: skip
    async with open_host() as hosted:
        play = runner(engine, hosted.host, **parts).play
        return await play(EpisodeKey("train", step, 5, 1), TASK, RolloutPlan(condition))


def read(renderer: ChatRenderer, traces: Sequence[TokenTrace]) -> list[str]:
    return [renderer.decode(trace.ids) for trace in traces]


@pytest.mark.parametrize("window", [None, 2, 1])
@pytest.mark.parametrize("name", FAMILIES)
async def test_the_stripped_view_holds_no_token_of_a_tip(
    name: str, window: int | None, tiny_actor: Path
) -> None:
    """Tests with the templates of published models are in tests/engines/test_chat_templates.py."""
    renderer = family(name, tiny_actor)
    guided = await episode(renderer, "guided", Tips(), window=window)
    free = await episode(renderer, "free", Tips(), window=window)
    samples = read(renderer, guided.traces)
    assert len(samples) == (3 if window else 1)
    assert {f"zebra {n}" in "".join(samples) for n in range(6)} == {True}
    rerender = Rerenderer(renderer, {"doors": replace(LIMITS["doors"], window=window)})
    view = StrippedView(ALWAYS, BEHAVIOUR, mask_truncated=False)(guided, rerender)
    assert "zebra" not in "".join(read(renderer, view))
    assert read(renderer, view) == read(renderer, free.traces)


async def test_tips_are_searched_by_the_state_before_every_turn(tiny_actor: Path) -> None:
    tips = Tips()
    guided = await episode(family("chatml", tiny_actor), "guided", tips)
    texts = [segment.text for segment in guided.segments if segment.origin == "experience"]
    assert texts == [f"Mind the zebra {n}.\nMind the zebra {n + 1}." for n in (0, 2, 4)]
    asked = [(r.turn, r.query, len(r.shown)) for r in tips.requests[::2]]
    assert asked == [
        (0, "A door.", 0),
        (1, "Nothing happens.", 2),
        (2, "You cannot do that.", 4),
    ]
    assert [use.uid for use in guided.used] == [f"t{n}" for n in range(6)]
    free = await episode(family("chatml", tiny_actor), "free", tips)
    assert (free.used, len(tips.requests)) == ((), 6)


async def test_the_key_of_a_tip_is_the_state_in_which_its_episode_acted_last(
    tiny_actor: Path,
) -> None:
    """The closing text of an episode is never a state in which a later episode searches."""
    tips = Tips()
    guided = await episode(family("chatml", tiny_actor), "guided", tips)
    assert guided.segments[-1].text == "It opens."
    assert STATE_KEYS["state"].of_last_action(guided.segments) == "You cannot do that."
    assert tips.requests[-1].query == "You cannot do that."
    conversation = STATE_KEYS["conversation"].of_last_action(guided.segments)
    assert conversation == (
        f"system: {RULES} user: Open it. user: A door. assistant: wait user: Nothing happens. "
        "assistant: shout user: You cannot do that."
    )
    context = ChatContext({"doors": RULES}, state=STATE_KEYS["conversation"])
    first = context.query(TASK, Observation("A door."))
    assert first == f"system: {RULES} user: Open it. user: A door."
    assert context.turn_query(TASK, guided.segments[:-2]) == conversation


async def test_the_three_cases_of_the_importance_ratio(tiny_actor: Path) -> None:
    """Case by case: the prompt of π_θ, and the old log-probs (appendix C, table 3)."""
    renderer = family("chatml", tiny_actor)
    rerender = Rerenderer(renderer, LIMITS)
    guided, free = [await episode(renderer, c, Tips()) for c in ("guided", "free")]
    on_policy = StrippedView(NEVER, BEHAVIOUR, mask_truncated=False)
    assert on_policy(free, rerender) is free.traces
    assert on_policy(guided, rerender) is guided.traces
    for old in (BEHAVIOUR, STEP_START):
        off_policy = StrippedView(ALWAYS, old, mask_truncated=False)
        assert off_policy(free, rerender) is free.traces
        view = off_policy(guided, rerender)
        assert _sampled(view, "versions") == [old] * len(_sampled(view, "versions"))
        assert _sampled(view, "ids") == _sampled(guided.traces, "ids")
        logprobs = _sampled(guided.traces, "logprobs")
        assert _sampled(view, "logprobs") == (
            logprobs if old == BEHAVIOUR else [0.0] * len(logprobs)
        )


def _sampled(traces: Sequence[TokenTrace], name: str) -> list[float]:
    return [
        value
        for trace in traces
        for value, mask in zip(getattr(trace, name), trace.mask, strict=True)
        if mask
    ]


def loss(
    logp: list[float], old: list[float], advantage: float, delta: float
) -> tuple[float, float]:
    """Return the loss of one sequence and its share of masked tokens. Clip: 0.2 and 0.3."""
    value, metrics = SurrogateLoss(0.2, 0.3, "token", delta)(
        torch.tensor([logp]).log(),
        torch.tensor([old]).log(),
        torch.tensor([advantage]),
        torch.ones(1, len(logp)),
        weights=torch.ones(1),
        total_tokens=len(logp),
    )
    return float(value), float(metrics.get("low_probability_fraction", 0))


def test_the_ratio_of_the_three_cases_by_hand() -> None:
    # On-policy, without or with tips: both policies read the same prompt, 0.5 / 0.4 = 1.25.
    assert loss([0.5], [0.4], 1.0, 0.0)[0] == pytest.approx(-1.25)
    # Off-policy: with tips the token had 0.8, without them it has 0.4. A ratio of 0.5 is clipped
    # only if the advantage is negative: min(0.5 · −1, 0.8 · −1) = −0.8.
    assert loss([0.4], [0.8], 1.0, 0.0)[0] == pytest.approx(-0.5)
    assert loss([0.4], [0.8], -1.0, 0.0)[0] == pytest.approx(0.8)
    # Old log-probs without tips: the token had 0.4 at the start of the step. Now it has 0.5, and
    # the ratio is 1.25. With the log-prob of the rollout, 0.8, it would be 0.625.
    assert loss([0.5], [0.4], -1.0, 0.0)[0] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("off_policy", "old", "ratio", "positive", "negative"),
    [
        (NEVER, BEHAVIOUR, 0.5, -0.5, 0.8),
        (ALWAYS, BEHAVIOUR, 0.5, -0.5, 0.8),  # the log-probs of the rollout, with tips
        (ALWAYS, STEP_START, 1.0, -1.0, 1.0),  # those of the trainer, without tips
    ],
)
async def test_the_ratio_of_the_three_cases_in_the_trainer(
    off_policy: MemorySteps, old: OldPolicy, ratio: float, positive: float, negative: float,
    tiny_actor: Path,
) -> None:  # fmt: skip
    """For the trainer all tokens are equally likely. With tips, they were twice as likely."""
    renderer = family("chatml", tiny_actor)
    guided = await episode(renderer, "guided", Tips())
    sampled = math.log(2 / V)
    traces = tuple(
        replace(t, logprobs=tuple(sampled * bool(m) for m in t.mask)) for t in guided.traces
    )
    view = StrippedView(off_policy, old, mask_truncated=False)
    (trace,) = view(replace(guided, traces=traces), Rerenderer(renderer, LIMITS))
    for advantage, expected in ((1.0, positive), (-1.0, negative)):
        model = uniform_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        loss = SurrogateLoss(0.2, 0.3, "token")
        trainer = Trainer(model, optimizer, schedule, loss, TrainSettings(1.0, 4096, 1e9))
        batch = Minibatch((TrainSample(trace, advantage, 1.0),), sum(trace.mask))
        stats = trainer.step([batch], version=0)
        assert stats.metrics["ratio_mean"] == pytest.approx(ratio, rel=1e-4)
        assert stats.metrics["loss"] == pytest.approx(expected, rel=1e-4)


V = 2048
"""Vocabulary of the uniform model, larger than that of the tokenizer."""


def uniform_model() -> PreTrainedModel:
    """Return a model for which all tokens are equally likely: log p = −log V."""
    config = Qwen2Config(
        vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=8, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    torch.nn.init.zeros_(model.get_parameter("lm_head.weight"))
    return model


def test_tokens_of_low_probability_have_no_advantage_by_hand() -> None:
    # Eq. 2 with δ = 0.1: the terms are 1.25, 0 and 1, divided by all three tokens.
    value, masked = loss([0.5, 0.05, 0.11], [0.4, 0.4, 0.11], 1.0, 0.1)
    assert value == pytest.approx(-(1.25 + 1.0) / 3)
    assert masked == pytest.approx(1 / 3)
    logp = torch.tensor([[0.5, 0.05]]).log().requires_grad_()
    one = torch.ones(1)
    masked_loss, _ = SurrogateLoss(0.2, 0.3, "token", 0.1)(
        logp, logp.detach(), one, torch.ones(1, 2), weights=one, total_tokens=2
    )
    masked_loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-0.5, 0.0])


def test_a_negative_term_has_a_bound_by_hand() -> None:
    # ρ = 20 and A = −1: the term −20 is raised to 10 · A. With A = 1 it is clipped to 1.3.
    old = torch.tensor([[0.02]]).log()
    logp, one = torch.tensor([[0.4]]).log(), torch.ones(1)
    for dual_clip, advantage, term in ((None, -1.0, -20.0), (10.0, -1.0, -10.0), (10.0, 1.0, 1.3)):
        value, _ = SurrogateLoss(0.2, 0.3, "token", 0.1, dual_clip)(
            logp, old, advantage * one, torch.ones(1, 1), weights=one, total_tokens=1
        )
        assert float(value) == pytest.approx(-term, rel=1e-5)


def test_tokens_of_low_probability_have_no_gradient_by_the_ratio_of_their_sequence() -> None:
    # The term of the first token is ρ / 2, and log ρ is the mean of both log-ratios. So the
    # derivative is 1/2 · 1/2 for both log-probs, but the second one is masked.
    logp = torch.tensor([[0.5, 0.001]]).log().requires_grad_()
    one = torch.ones(1)
    masked_loss, _ = SurrogateLoss(0.2, 0.3, "sequence", 0.1)(
        logp, logp.detach(), one, torch.ones(1, 2), weights=one, total_tokens=2
    )
    masked_loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-0.25, 0.0])


def test_advantages_per_token_are_masked_too() -> None:
    logp = torch.tensor([[0.5, 0.05]]).log()
    value, _ = SurrogateLoss(0.2, 0.3, "token", 0.1)(
        logp, logp, torch.tensor([[2.0, 4.0]]), torch.ones(1, 2),
        weights=torch.ones(1), total_tokens=2,
    )  # fmt: skip
    assert float(value) == pytest.approx(-1.0)


def visited(
    *states: str,
    member: int = 0,
    goal: str = "Open it.",
    variation: int | None = None,
    **facts: Any,
) -> Trajectory:
    segments = tuple(
        segment
        for state in states
        for segment in (Segment("user", state, "env"), Segment("assistant", "go", "policy"))
    )
    params = {} if variation is None else {"variation": variation}
    task = type(TASK)(TASK.name, 0, "train", goal, params)
    return build_trajectory(
        task, 0, 0, member, segments=segments, turns=len(states), reward=1.0, **facts
    )


async def test_novelty_by_hand() -> None:
    """1/n for the n-th visit of a state, in earlier steps and in the episode, per goal."""
    novelty, embedder = StateNovelty(0.1, 0.99), HashEmbedder()
    batch = [
        visited("a red door", "a blue lake", "a red door"),  # 1 + 1 + 1/2
        visited("a red door", member=1),  # 1: visits of other episodes of the step do not count
        visited("a red door", member=2, goal="Swim."),  # 1
        visited("a red door", member=3, error="env: lost"),
    ]
    rewarded = await novelty.add(batch, embedder)
    assert [t.rewards.get("novelty") for t in rewarded] == [
        pytest.approx(0.25), pytest.approx(0.1), pytest.approx(0.1), None,
    ]  # fmt: skip
    assert rewarded[0].reward == pytest.approx(1.25)
    again = StateNovelty(0.1, 0.99)
    again.load_state(novelty.state())
    for memory in (novelty, again):
        (next_one,) = await memory.add([visited("a red door", "a blue lake")], embedder)
        assert next_one.rewards["novelty"] == pytest.approx(0.1 * (1 / 4 + 1 / 2))


async def test_only_new_states_are_rewarded_if_wanted_and_returning_ones_are_remembered() -> None:
    novelty, embedder = StateNovelty(0.1, 0.99, only_new=True), HashEmbedder()
    for expected in (0.2, 0.0):
        (t,) = await novelty.add([visited("a red door", "a blue lake", "a red door")], embedder)
        assert t.rewards["novelty"] == pytest.approx(expected)


def test_the_metric_of_novelty_leaves_out_episodes_with_an_error() -> None:
    batch = [visited("a red door").with_rewards({"novelty": n}) for n in (0.1, 0.3)]
    failed = visited("a red door", error="env: lost")
    assert novelty_metrics([*batch, failed]) == {"rollout/novelty": pytest.approx(0.2)}
    assert novelty_metrics([failed]) == {}


async def test_equal_episodes_of_a_group_have_equal_novelty_and_no_advantage() -> None:
    novelty, embedder = StateNovelty(0.03, 0.99), HashEmbedder()
    for expected in (0.06, 0.03 * 2 / 5):  # 4 visits of each state in the first step
        batch = [visited("a red door", "a blue lake", member=n) for n in range(4)]
        rewarded = await novelty.add(batch, embedder)
        assert [t.rewards["novelty"] for t in rewarded] == [pytest.approx(expected)] * 4
        assert GroupAdvantage("std")(rewarded).tolist() == [0.0] * 4


async def test_novelty_does_not_depend_on_the_order_of_the_batch() -> None:
    batch = [
        visited("a red door", "a red door!", member=0),
        visited("a red doors", "a blue lake", member=1),
        visited("a blue lake", "a red door", member=2),
    ]
    seen = []
    for order in permutations(batch):
        novelty = StateNovelty(1.0, 0.6)
        first = await novelty.add(order, HashEmbedder())
        second = await novelty.add(order, HashEmbedder())
        seen.append(
            [{t.address.member: t.rewards["novelty"] for t in step} for step in (first, second)]
            + [novelty.state()]
        )
    assert all(result == seen[0] for result in seen)


async def test_variations_of_a_goal_have_their_own_states() -> None:
    novelty, embedder = StateNovelty(1.0, 0.99), HashEmbedder()

    async def reward(memory: StateNovelty, variation: int | None) -> float:
        (t,) = await memory.add([visited("a red door", variation=variation)], embedder)
        return t.rewards["novelty"]

    rewards = [await reward(novelty, variation) for variation in (0, 3, None, 3)]
    assert rewards == [1.0, 1.0, 1.0, 0.5]
    again = StateNovelty(1.0, 0.99)
    again.load_state(json.loads(json.dumps(novelty.state())))
    assert [await reward(again, variation) for variation in (0, 3, 7)] == [0.5, 1 / 3, 1.0]


@pytest.mark.parametrize(
    ("method", "reads"), [("complementary", True), ("reflexion", True), ("empo2", False)]
)
def test_the_writer_of_tips_does_not_read_tips(method: str, reads: bool) -> None:
    config = load(["room"], options={"method": method})
    prompts = bank_prompts(config, tasks.specs(config), renderer())
    assert prompts.guidance == reads


ROOT_HALF = 0.5**0.5
"""Advantages of two members with different rewards are ±√½, with the scale std."""


@pytest.mark.parametrize(
    ("place", "coef", "both_fail", "first_succeeds"),
    [
        ("advantage", 0.02, -0.01, ROOT_HALF - 0.01),
        ("advantage", 0.01, -0.005, ROOT_HALF - 0.005),
        ("reward", 0.02, -ROOT_HALF, ROOT_HALF),
        ("reward", 0.01, -ROOT_HALF, ROOT_HALF),
    ],
)
async def test_novelty_is_added_to_the_advantage_or_to_the_reward(
    place: Literal["advantage", "reward"], coef: float, both_fail: float, first_succeeds: float
) -> None:
    """The first episode has one new state, and the second one has two."""
    terms = advantage_terms(Empo2Section(novelty_in=place), "std")
    for outcome, expected in ((0.0, both_fail), (1.0, first_succeeds)):
        first, second = visited("a red door"), visited("a red door", "a blue lake", member=1)
        batch = [first.with_rewards({"outcome": outcome}), second.with_rewards({"outcome": 0.0})]
        rewarded = await StateNovelty(coef, 0.99).add(batch, HashEmbedder())
        advantages = torch.stack([term(rewarded) for term in terms]).sum(0)
        assert advantages.tolist() == pytest.approx([expected, -expected], rel=1e-3)


async def test_similar_states_count_as_one() -> None:
    novelty = StateNovelty(1.0, 0.5)
    (t,) = await novelty.add([visited("a red door", "a red door!")], HashEmbedder())
    assert t.rewards["novelty"] == pytest.approx(1.5)


def test_a_mode_is_drawn_for_a_whole_step() -> None:
    planner = MemorySteps(0.25, 7, "rollout mode")
    modes = []
    for step in range(2000):
        conditions = {plan.condition for plan in planner.plan(TASK, 4, step)}
        assert len(conditions) == 1
        modes += conditions
    assert modes.count("guided") / 2000 == pytest.approx(0.25, abs=0.03)
    assert [step in planner for step in range(50)] == [m == "guided" for m in modes[:50]]
    other = MemorySteps(0.25, 7, "update mode")
    assert [step in other for step in range(50)] != [step in planner for step in range(50)]


def test_the_settings_of_the_method() -> None:
    config = load(["room"], options={"method": "empo2"})
    assert (config.bank.scope, config.bank.max_per_goal, config.bank.evict) == (
        "variation",
        1000,
        "fifo",
    )
    assert (config.actor.clip_low, config.actor.clip_high) == (0.2, 0.3)
    loss = build_method(config, tasks.specs(config)).actor.loss
    assert loss == SurrogateLoss(0.2, 0.3, "token", math.exp(-5), dual_clip=10.0)
    assert (config.retrieval.min_similarity, config.retrieval.per) == (0.5, "rollout")
    assert (config.writer, config.with_extractor, config.trains_extractor) == (
        "actor",
        False,
        False,
    )
    settings = config.method_settings
    assert (settings.memory_share, settings.off_policy_share, settings.tips) == (0.25, 2 / 3, 10)
    assert settings.low_probability == math.exp(-5)
    assert build_method(config, tasks.specs(config)).advice == Advice(10, every_turn=True)
    for setting, old in (("with_tips", BEHAVIOUR), ("without_tips", STEP_START)):
        sets = [f"empo2.off_policy_old={setting}"]
        config = load(["room"], options={"method": "empo2"}, sets=sets)
        view = build_method(config, tasks.specs(config)).actor.view
        assert isinstance(view, StrippedView)
        assert view.old == old, setting
    off = load(["room"], options={"method": "empo2"}, sets=["empo2.novelty_coef=0"])
    assert build_method(off, tasks.specs(off)).step.intrinsic is None


@pytest.mark.parametrize("method", ["empo2", "reflexion"])
@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("retrieval.per=group", "retrieval.per = 'group'"),
        ("ask.enabled=true", "ask.enabled = True"),
        ("critic.enabled=true", "critic.enabled = True"),
        ("bank.evict_votes=2", "bank.evict_votes = 2"),
    ],
)
def test_settings_that_contradict_notes(method: str, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        load(["room"], options={"method": method}, sets=[setting])
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(("setting", "key"), [("top_p=0.9", "top_p"), ("top_k=20", "top_k")])
def test_old_logprobs_with_tips_need_all_tokens(setting: str, key: str) -> None:
    def load_with(*sets: str) -> None:
        load(["room"], options={"method": "empo2"}, sets=[f"actor.{setting}", *sets])

    with pytest.raises(ConfigError, match=f"cannot be used with actor.{key}") as caught:
        load_with()
    assert str(caught.value).startswith("empo2.off_policy_old = 'with_tips'")
    load_with("empo2.off_policy_old=without_tips")
    load_with("empo2.off_policy_share=0")


def test_variations_of_scienceworld_and_alfworld_have_their_own_memory() -> None:
    for name in ("scienceworld", "alfworld"):
        spec = get_spec(name)
        played = [
            *spec.tasks.train_stream(0, StreamSettings()).draw(80),
            *spec.tasks.eval_tasks("unseen", 40, 0, StreamSettings()),
        ]
        assert len({task.goal for task in played}) < len(played), "goals do not tell them apart"
        assert len({task.place for task in played}) == len(played)


@pytest.mark.parametrize("name", ["room", "webshop", "alfworld_small", "search_qa_small"])
def test_elsewhere_a_goal_has_no_variations(name: str) -> None:
    drawn = get_spec(name).tasks.train_stream(0, StreamSettings()).draw(200)
    assert not any(task.place.variation for task in drawn)


@pytest.mark.parametrize("name", ["room", "alfworld_small"])
def test_in_rooms_and_houses_the_goal_identifies_the_place(name: str) -> None:
    drawn = get_spec(name).tasks.train_stream(0, StreamSettings()).draw(200)
    places = {(task.goal, task.params["lgen"]) for task in drawn}
    assert len(places) == len({task.goal for task in drawn})


@pytest.mark.parametrize("method", ["empo2", "reflexion", "role_agent"])
def test_presets_that_ask_do_not_ask_about_notes(method: str) -> None:
    config = load(["room"], preset="node8", options={"method": method})
    assert not (config.ask.enabled)
    assert not (config.critic.enabled)
    assert not (config.extractor.merge_every)


async def test_states_of_goals_that_were_not_played_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(novelty_module, "MAX_PLACES", 2)
    monkeypatch.setattr(novelty_module, "MAX_STATES", 2)
    novelty, embedder = StateNovelty(1.0, 0.99), HashEmbedder()

    async def reward(goal: str, *states: str) -> float:
        (t,) = await novelty.add([visited(*states, goal=goal)], embedder)
        return t.rewards["novelty"]

    assert await reward("a", "a red door", "a blue lake", "the tall grey tower") == 3.0
    assert await reward("a", "a red door") == 1.0, "forgotten as the oldest state"
    assert await reward("b", "a red door") == 1.0
    assert await reward("a", "a red door") == 0.5
    assert await reward("c", "a red door") == 1.0
    assert await reward("b", "a red door") == 1.0, "forgotten with its goal"
