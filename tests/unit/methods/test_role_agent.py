"""Role-Agent: rewards of predictions with values worked out by hand, and the built method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from crl.config import load
from crl.errors import ConfigError
from crl.methods.parts.predicted import PredictedStepAdvantage
from crl.methods.parts.predicting import (
    PredictionMetrics,
    horizons,
    prediction_rewards,
    predictions,
    requests,
)
from crl.methods.parts.rollouts import ChatContext
from crl.methods.parts.training import GroupAdvantage
from crl.planning import tasks
from crl.planning.methods import build_method
from crl.rollout.episode import EpisodeKey
from crl.types import Observation, RolloutPlan, Segment, Trajectory
from support.doors import TASK, open_host, runner, scripted
from support.trajectories import build_trajectory


def reply(*predicted: str) -> str:
    tags = "".join(f"<prediction>{text}</prediction>" for text in predicted)
    return f"I go. {tags}\n<answer>go</answer>"


def episode(member: int, last: str, *turns: tuple[str, str, float]) -> Trajectory:
    """Return an episode of turns (observation, reply, reward), and its last observation."""
    segments = [
        segment
        for seen, text, _ in turns
        for segment in (Segment("user", seen, "env"), Segment("assistant", text, "policy"))
    ]
    rewards = tuple(reward for *_, reward in turns)
    return build_trajectory(
        TASK, 0, 0, member, segments=(*segments, Segment("user", last, "env")),
        turn_rewards=rewards, reward=sum(rewards),
    )  # fmt: skip


EPISODE = episode(
    0,
    "dddd",
    ("aaaa", reply("bbbb", "cccc"), 0.0),
    ("bbbb", reply("ccxx", "dddx"), 0.0),
    ("cccc", reply("dddd"), 1.0),
)


def test_rewards_of_predictions_by_hand():
    # 2 · (longest common subsequence) / (both lengths)
    assert prediction_rewards(EPISODE, 1) == [[1.0], [0.5], [1.0]]
    # The third reply has one prediction. The state after the last one does not exist.
    assert prediction_rewards(EPISODE, 2) == [[1.0, 1.0], [0.5, 0.75], [1.0, None]]
    late = episode(0, "bbbb", ("aaaa", reply("bbbb", "cccc"), 1.0))
    assert prediction_rewards(late, 2) == [[1.0, 0.0]]


def advantage(horizon: int, coef: float = 1.0) -> PredictedStepAdvantage:
    return PredictedStepAdvantage(1.0, 0.5, 1.0, "none", {"doors": horizon}, coef)


def test_modulated_returns_by_hand():
    # R_task with γ = 1/2 is 1/4, 1/2, 1.
    assert advantage(1).modulated_returns(EPISODE) == [0.25 * 2, 0.5 * 1.5, 1 * 2]
    # H = 2: R_pre is 1 + 1/2, 1/2 + 3/8, 1.
    assert advantage(2).modulated_returns(EPISODE) == [0.25 * 2.5, 0.5 * 1.875, 1 * 2]
    assert advantage(1, 0.2).modulated_returns(EPISODE) == pytest.approx([0.3, 0.55, 1.2])
    lost = episode(0, "bbbb", ("aaaa", reply("bbbb"), 0.0))
    assert advantage(1).modulated_returns(lost) == [0], "a failure earns nothing by predictions"


def alfworld(predicted: str, turns: int, last_reward: float) -> Trajectory:
    """Return an episode with the rewards of ALFWorld: −1 in the first turn, +2 for success."""
    rewards = [-1.0, *[0.0] * (turns - 2), last_reward]
    played = [(f"s{k}", reply(predicted or f"s{k + 1}"), r) for k, r in enumerate(rewards)]
    return episode(0, f"s{turns}", *played)


def test_negative_rewards_are_not_modulated():
    # γ = 1/2, R_pre = 1. R_task is −1 + 2/4, 2/2, 2. The part of positive rewards is 2/4, 2/2, 2.
    assert advantage(1).modulated_returns(alfworld("", 3, 2.0)) == [0.0, 2.0, 4.0]
    assert advantage(1, 0.2).modulated_returns(alfworld("", 3, 2.0)) == pytest.approx(
        [-0.4, 1.2, 2.4]
    )
    assert advantage(1).modulated_returns(alfworld("", 3, 0.0)) == [-1, 0, 0], "a failure"


def rewarded(predicted: str, *rewards: float, success: bool = False) -> list[float]:
    """Return R_t of an episode with these rewards, γ = 1/2 and H = 1."""
    played = [(f"s{k}", reply(predicted or f"s{k + 1}"), r) for k, r in enumerate(rewards)]
    played_episode = episode(0, f"s{len(rewards)}", *played)
    outcome = replace(played_episode.outcome, success=success)
    return advantage(1).modulated_returns(replace(played_episode, outcome=outcome))


@pytest.mark.parametrize("rewards", [(0, 0.3, 0, -0.3), (0.1, 0.2, -0.3), (0.3, 0, -0.5), (0, 0)])
def test_predictions_earn_nothing_in_a_failed_episode(rewards: tuple[float, ...]):
    """The second sum is 5.6e-17 because of rounding errors."""
    assert rewarded("", *rewards) == rewarded("nothing", *rewards)


def test_predictions_count_if_the_episode_gains_in_all_or_is_a_success():
    # R_task is 0.3 − 0.2/2 and −0.2. The part of positive rewards is 0.3 and 0.
    assert rewarded("", 0.3, -0.2) == pytest.approx([0.2 + 0.3, -0.2])
    assert rewarded("", -2, 1, success=True) == pytest.approx([-1.5 + 0.5, 1 + 1])


@pytest.mark.parametrize("turns", [2, 14, 20, 50])
def test_accurate_predictions_raise_the_advantage_of_a_success_in_alfworld(turns: int):
    """−1 + 2 γ^(T−1) < 0 from T = 15 on with γ = 0.95."""
    term = PredictedStepAdvantage(1.0, 0.95, 1.0, "std", {"doors": 1}, 1.0)
    right, wrong = alfworld("", turns, 2.0), alfworld("nothing", turns, 2.0)
    accurate, inaccurate = term([right, wrong]).values
    # Two values have the advantages ±1/√2.
    assert accurate == pytest.approx([2**-0.5] * turns, abs=1e-4)
    assert inaccurate == pytest.approx([-(2**-0.5)] * turns, abs=1e-4)
    (first, *_), _ = (term.modulated_returns(t) for t in (right, wrong))
    assert first == pytest.approx(-1 + 2 * 2 * 0.95 ** (turns - 1))
    lost = [alfworld("", turns, 0.0), alfworld("nothing", turns, 0.0)]
    assert term(lost).values == [[0.0] * turns] * 2, "a failure earns nothing by predictions"


def test_step_advantages_compare_modulated_returns():
    good = episode(0, "bbbb", ("aaaa", reply("bbbb"), 1.0))
    bad = episode(1, "bbbb", ("aaaa", reply(), 1.0))
    assert advantage(1)([good, bad]).values == [[0.5], [-0.5]]
    unpredicted = PredictedStepAdvantage(1.0, 0.5, 1.0, "none", {}, 1.0)
    assert unpredicted([good, bad]).values == [[0], [0]], "tasks without predictions"


def test_only_predictions_of_the_answer_count():
    thought = "<think>or <prediction>no</prediction></think> <PREDICTION> a\nb </PREDICTION>"
    assert predictions(thought) == ["a\nb"]
    assert predictions("<think><prediction>no</prediction>") == []
    assert predictions("<prediction>a <prediction>b</prediction>") == ["b"]


def test_metrics_of_predictions():
    assert PredictionMetrics({"doors": 2})([EPISODE]) == {
        "rollout/prediction/similarity": pytest.approx(4.25 / 6),
        "rollout/prediction/missing": pytest.approx(1 / 6),
    }
    assert PredictionMetrics({})([EPISODE]) == {}


def test_the_share_of_predictions_in_the_replies():
    """The share counts characters, tags included, of all replies. Thoughts are no predictions."""
    tag = "<prediction>ab</prediction>"  # 27 characters
    plain = "x" * 27
    both = episode(0, "s", ("s", plain + tag, 0.0), ("s", plain, 0.0))
    thinks = episode(1, "s", ("s", f"<think>{tag}</think>{tag}", 0.0))
    metrics = PredictionMetrics({"doors": 1})
    assert metrics.share([both]) == pytest.approx(1 / 3)
    assert metrics.share([thinks]) == pytest.approx(27 / (2 * 27 + 15))
    assert metrics.share([both, thinks]) == pytest.approx(2 * 27 / (5 * 27 + 15))
    assert metrics.share([]) == PredictionMetrics({}).share([both]) == 0


@pytest.mark.parametrize(
    ("turns", "share", "horizon"),
    [(4, 0.05, 1), (15, 0.05, 1), (30, 0.05, 2), (50, 0.05, 2), (70, 0.05, 4), (50, 0.06, 3),
     (15, 0.1, 2), (50, 0.1, 5), (50, 0.0, 1)],
)  # fmt: skip
def test_the_horizon_is_rounded_half_to_even(turns: int, share: float, horizon: int):
    """The products of 30, 50 and 70 turns and 0.05 are 1.5, 2.5 and 3.5."""
    task = load(["alfworld"], sets=["tasks.alfworld.rendering=full",
                f"tasks.alfworld.max_turns={turns}"]).tasks["alfworld"]  # fmt: skip
    assert horizons({"alfworld": task}, share) == {"alfworld": horizon}


def test_the_horizon_is_a_share_of_the_turns():
    config = load(["alfworld", "webshop", "room"], sets=["tasks.alfworld.rendering=full",
                  "tasks.webshop.rendering=full", "tasks.alfworld.max_turns=50",
                  "tasks.webshop.max_turns=15"])  # fmt: skip
    assert horizons(config.tasks, 0.05) == {"alfworld": 2, "webshop": 1}
    assert horizons(config.tasks, 0.2) == {"alfworld": 10, "webshop": 3}
    assert set(horizons(config.tasks, 0).values()) == {1}


async def test_the_agent_is_asked_for_predictions_which_are_no_part_of_its_action():
    context = ChatContext({"doors": "Rules."}).with_predictions(requests({"doors": 2}))
    system = context.opening(TASK, Observation("A door."), [])[0]
    assert system.text.startswith("Rules.\n\nIn every reply")
    assert "2 prediction(s)" in system.text
    assert context.parse(TASK, reply("<answer>x</answer>")).action == "I go. \n<answer>go</answer>"
    asked = ChatContext({"doors": ""}).with_predictions({"doors": "Predict."})
    assert asked.opening(TASK, Observation("A door."), [])[0].text == "Predict."
    async with open_host() as opened:
        engine = scripted("<prediction>It opens.</prediction> open")
        player = runner(engine, opened.host, context=context)
        key = EpisodeKey("train", 0, 0, 0)
        player.join(key)
        played = await player.play(key, TASK, RolloutPlan("free"))
    assert played.success
    assert prediction_rewards(played, 1) == [[1.0]]


def test_the_method_is_gigpo_with_other_returns():
    sets = ["role_agent.episode_weight=2"]
    config = load(["room"], options={"method": "role_agent"}, sets=sets)
    method = build_method(config, tasks.specs(config))
    replay = method.step.replay
    assert isinstance(replay, partial)
    assert replay.keywords["settings"].waiting == 3 * config.rollout.groups
    assert method.actor.terms == (
        GroupAdvantage("std", 2.0),
        PredictedStepAdvantage(1.0, 0.95, 1.0, "std", {}, 1.0),
    )
    sets = ["role_agent.gamma=0.5", "role_agent.similarity=0.75"]
    other = load(["room"], options={"method": "role_agent"}, sets=sets)
    _, turns = build_method(other, tasks.specs(other)).actor.terms
    assert turns == PredictedStepAdvantage(1.0, 0.5, 0.75, "std", {}, 1.0)
    full = load(["room"], options={"method": "role_agent"}, sets=["tasks.room.rendering=full"])
    context = build_method(full, tasks.specs(full)).context
    assert isinstance(context, ChatContext)
    assert "prediction" in context.predictions["room"]
    sets = ["tasks.room.rendering=full", "role_agent.prediction_weight=0.2"]
    weighed = load(["room"], options={"method": "role_agent"}, sets=sets)
    _, turns = build_method(weighed, tasks.specs(weighed)).actor.terms
    assert turns == PredictedStepAdvantage(1.0, 0.95, 1.0, "std", {"room": 1}, 0.2)
    off = load(["room"], options={"method": "role_agent"},
               sets=["tasks.room.rendering=full", "role_agent.prediction_weight=0"])  # fmt: skip
    silent = build_method(off, tasks.specs(off)).context
    assert isinstance(silent, ChatContext)
    assert silent.predictions == {}


@pytest.mark.parametrize("setting", ["horizon=0.1", "prediction_weight=0.2"])
def test_a_setting_of_predictions_needs_agents_that_predict(setting: str):
    name, value = setting.split("=")
    with pytest.raises(ConfigError) as refused:
        load(["room"], options={"method": "role_agent"}, sets=[f"role_agent.{setting}"])
    assert str(refused.value) == (
        f"role_agent.{name} = {value}: has no effect because only agents of the full rendering "
        "predict. Use a language model, or leave it out."
    )
    assert load(["room"], options={"method": "role_agent"},
                sets=[f"role_agent.{setting}", "tasks.room.rendering=full"])  # fmt: skip


def test_a_weight_of_0_is_never_refused():
    sets = ["role_agent.prediction_weight=0"]
    assert load(["room"], options={"method": "role_agent"}, sets=sets)
    sets += ["role_agent.horizon=0.1", "tasks.room.rendering=full"]
    with pytest.raises(ConfigError, match=r"because role_agent\.prediction_weight is 0"):
        load(["room"], options={"method": "role_agent"}, sets=sets)


def test_notes_that_no_agent_reads_are_not_enough_to_learn():
    sets = ["role_agent.writer=extractor", "actor.train=false"]
    with pytest.raises(ConfigError, match="to learn: role_agent shows its notes to no agent"):
        load(["room"], options={"method": "role_agent"}, sets=sets)


def test_the_plan_tells_predictions_and_replay():
    config = load(["room", "webshop"], options={"method": "role_agent"},
                  sets=["tasks.room.rendering=full", "tasks.room.max_turns=31"])  # fmt: skip
    assert config.method_settings.plan(config) == [
        "predictions  room 2 states per reply",
        "replay       with probability 0.25, a retrieved task replaces a drawn one: at most 3 per "
        "failure mode of a group, of the last 2,000",
    ]
    sets = ["role_agent.replay_ratio=0", "role_agent.prediction_weight=0"]
    off = load(["room"], options={"method": "role_agent"}, sets=sets)
    assert off.method_settings.plan(off) == ["predictions  none", "replay       none"]
