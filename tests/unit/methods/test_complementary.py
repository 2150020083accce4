"""Methods: the parts of `complementary` and its switches. Each part computes its equation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crl.config.catalog import task_file
from crl.config.load import task_settings
from crl.config.schema import RunConfig
from crl.config.validate import run_config
from crl.envs.base import Rendering
from crl.envs.room import SPEC
from crl.manager import DistilRequest, EpisodeId
from crl.methods import complementary, grpo
from crl.methods.parts.distilling import CompactDistilPrompt, EveryEpisode, NoEpisode, turns_text
from crl.methods.parts.records import compact_record, full_record
from crl.methods.parts.rollouts import ChatContext, GuidedShare
from crl.methods.parts.training import (
    CispoLoss,
    GroupAdvantage,
    LiftAdvantage,
    SelfDistillation,
    SplitAdvantage,
)
from crl.planning.context import chat_context
from crl.protocols import Hit, Method
from crl.types import Condition, ExperienceUse, Observation, Segment, Task, TrackRecord, Trajectory
from support.doors import TASK
from support.trajectories import build_trajectory

# ── choice of the guided members ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("share", "members", "guided"),
    [(0.5, 8, 4), (0.6, 5, 3), (0.29, 100, 29), (0.5, 2, 1), (0.0, 8, 0), (1.0, 8, 8), (1.0, 3, 3)],
)
def test_the_first_members_of_a_group_are_guided(share: float, members: int, guided: int) -> None:
    conditions = [plan.condition for plan in GuidedShare(share).plan(TASK, members, step=0)]
    assert conditions == ["guided"] * guided + ["free"] * (members - guided)


# ── advantages ────────────────────────────────────────────────────────────────────────────────────


def episode(group: int, condition: Condition, reward: float) -> Trajectory:
    return build_trajectory(TASK, 0, group, 0, condition, reward=reward, success=reward > 0)


BATCH = [
    episode(0, "guided", 1.0), episode(0, "guided", 0.0),
    episode(0, "free", 0.0), episode(0, "free", 0.0),
    episode(1, "guided", 1.0), episode(1, "guided", 1.0),
    episode(1, "free", 1.0), episode(1, "free", 0.0),
]  # fmt: skip
"""Rewards (guided | free): group 0 has 1 0 | 0 0, group 1 has 1 1 | 1 0."""


@pytest.mark.parametrize(
    ("term", "by_hand"),
    [
        # within (group, condition): mean 1/2 if the rewards differ, otherwise no advantage
        (SplitAdvantage("none"), [0.5, -0.5, 0, 0, 0, 0, 0.5, -0.5]),
        # the standard deviation of {1, 0} with ddof = 1 is 1/√2
        (SplitAdvantage("std"), [0.5**0.5, -(0.5**0.5), 0, 0, 0, 0, 0.5**0.5, -(0.5**0.5)]),
        # across the group: the means are 1/4 and 3/4
        (GroupAdvantage("none"), [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]),
        # the standard deviation of {1, 0, 0, 0} is √((9 + 1 + 1 + 1) / 16 / 3) = 1/2
        (GroupAdvantage("std"), [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5]),
    ],
)
def test_advantages_by_hand(term: SplitAdvantage | GroupAdvantage, by_hand: list[float]) -> None:
    assert term(BATCH).tolist() == pytest.approx(by_hand, abs=1e-5)


def guided_episode(group: int, member: int, lesson: str, success: bool) -> Trajectory:
    use = (ExperienceUse(lesson, 1, "g", "start"),) if lesson else ()
    return build_trajectory(
        TASK,
        0,
        group,
        member,
        "guided",
        success=success,
        used=use,
        shown=(lesson,) if lesson else (),
    )


def free_episode(group: int, member: int, success: bool) -> Trajectory:
    return build_trajectory(TASK, 0, group, member, "free", success=success)


def test_self_distillation_selects_episodes_that_beat_the_free_members() -> None:
    batch = [
        # The mean reward of the free members is 0.25. The first guided member is above this mean,
        # the second one equals the mean, and the third one had no experience in its prompt.
        guided_episode(0, 0, "a", True), guided_episode(0, 1, "a", False),
        guided_episode(0, 2, "", True),
        free_episode(0, 3, False), free_episode(0, 4, True),
        # A group without free members has no mean to compare with.
        guided_episode(1, 0, "a", True),
    ]  # fmt: skip
    rewards = [0.5, 0.25, 1.0, 0.0, 0.5, 1.0]
    rewarded = [
        t.with_rewards({"outcome": reward}) for t, reward in zip(batch, rewards, strict=True)
    ]
    assert SelfDistillation(0.5)(rewarded).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_periodic_self_distillation_selects_episodes_of_every_nth_step() -> None:
    def weights(step: int, every: int) -> list[float]:
        members = [guided_episode(0, 0, "a", True), free_episode(0, 1, False)]
        batch = [
            replace(t, address=replace(t.address, step=step)).with_rewards({"outcome": reward})
            for t, reward in zip(members, (1.0, 0.0), strict=True)
        ]
        return SelfDistillation(0.5, every)(batch).tolist()

    assert [weights(step, 1) for step in range(3)] == [[0.5, 0.0]] * 3
    assert [weights(step, 3)[0] for step in range(7)] == [0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0]


def test_lift_advantage_is_the_lift_of_the_experience_in_its_group() -> None:
    batch = [
        # "a" wins 2 of 2, "b" wins 0 of 1, and the fourth member had no experience in its prompt.
        # The free members win 1 of 4.
        guided_episode(0, 0, "a", True), guided_episode(0, 1, "a", True),
        guided_episode(0, 2, "b", False), guided_episode(0, 3, "", True),
        free_episode(0, 4, True), free_episode(0, 5, False),
        free_episode(0, 6, False), free_episode(0, 7, False),
        # A group without free members has no success rate to compare with.
        guided_episode(1, 0, "a", True), guided_episode(1, 1, "a", False),
    ]  # fmt: skip
    assert LiftAdvantage(2.0)(batch).tolist() == [1.5, 1.5, -0.5] + [0.0] * 7


def test_split_advantages_ignore_the_benefit_of_guidance() -> None:
    """Let all guided episodes win and all free ones lose.

    Advantages across the group differ from zero. Advantages within the conditions are zero.
    """
    batch = [
        episode(3, "guided", 1.0),
        episode(3, "guided", 1.0),
        episode(3, "free", 0.0),
        episode(3, "free", 0.0),
    ]
    assert SplitAdvantage("std")(batch).tolist() == [0, 0, 0, 0]
    assert GroupAdvantage("none")(batch).tolist() == [0.5, 0.5, -0.5, -0.5]


# ── the extractor's loss ──────────────────────────────────────────────────────────────────────────


def cispo_loss(
    logp: list[list[float]], advantage: list[float], *, total_tokens: int = 4
) -> tuple[float, list[list[float]]]:
    """Return the CISPO loss and its gradient with respect to `logp` [2, 3].

    The first two tokens of row 0 and the first token of row 1 are trained, all others are masked.
    All behaviour log-probs are −1.
    """
    new = torch.tensor(logp, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    weights = torch.tensor([9.0, -9.0])
    loss, _ = CispoLoss(0.1, 0.2)(
        new, torch.full((2, 3), -1.0), torch.tensor(advantage), mask,
        weights=weights, total_tokens=total_tokens,
    )  # fmt: skip
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad.tolist()


def test_cispo_by_hand() -> None:
    """Compare with the loss −Σ clip(ρ)·A·logp / tokens.

    The clipped ratio is a constant, so every unmasked token has a gradient.

    Row 0: ρ = e^{−1 + 1} = 1 and ρ = e^{−0.5 + 1} = 1.6487, clipped to 1.2.
    Row 1: ρ = e^{−2 + 1} = 0.3679, clipped to 0.9.
    loss = −(1·2·(−1) + 1.2·2·(−0.5) + 0.9·(−1)·(−2)) / 4 = −(−2 − 1.2 + 1.8) / 4 = 0.35
    """
    loss, gradient = cispo_loss([[-1.0, -0.5, -7.0], [-2.0, -7.0, -7.0]], [2.0, -1.0])
    assert loss == pytest.approx(0.35)
    assert gradient == [pytest.approx([-2 / 4, -2.4 / 4, 0.0]), pytest.approx([0.9 / 4, 0.0, 0.0])]


def test_cispo_divides_by_the_tokens_of_the_whole_batch() -> None:
    few, _ = cispo_loss([[-1.0, -0.5, -7.0], [-2.0, -7.0, -7.0]], [2.0, -1.0], total_tokens=10)
    assert few == pytest.approx(0.14)


# ── choice of the distilled episodes ──────────────────────────────────────────────────────────────


def test_every_episode_without_an_error_is_distilled() -> None:
    lost = build_trajectory(TASK, 0, 0, 1, "free", error="env: lost")
    assert EveryEpisode().select([*BATCH, lost]) == BATCH, "guided and free, won and lost episodes"
    assert list(NoEpisode().select(BATCH)) == []


def test_a_compact_prompt_by_hand() -> None:
    segments = (
        Segment("user", "Open it.", "task"), Segment("user", "Go west.", "experience"),
        Segment("user", "A door.", "env"),
        Segment("assistant", "open", "policy"), Segment("user", "It opens.", "env"),
    )  # fmt: skip
    hint = Hit("Go west.", ExperienceUse("e1", 1, "g1", "start"))
    write = CompactDistilPrompt({"doors": turns_text})
    guided = DistilRequest(
        EpisodeId("run", 0, 0, 0), TASK, segments, success=True, truncated=False, shown=(hint,)
    )
    assert write(guided) == [
        Segment("user", "Open it.\nhint 1 Go west.\nA door.\nopen\nIt opens.\nsuccess", "task")
    ]
    free = DistilRequest(
        EpisodeId("run", 0, 0, 0), TASK, segments[:1] + segments[2:], success=False, truncated=True
    )
    assert write(free) == [Segment("user", "Open it.\nA door.\nopen\nIt opens.\nfailure", "task")]


# ── an experience's record ────────────────────────────────────────────────────────────────────────

RECORDS = (TrackRecord(), TrackRecord(4, 3), TrackRecord(20, 11, lift=-0.254))


def test_text_of_records_by_hand() -> None:
    """Check records scaled to ten for tiny models: 11 of 20 is 5.5 of 10, rounded to even."""
    assert [compact_record("Go west.", record) for record in RECORDS] == [
        "Go west.",
        "won 3 of 4 Go west.",
        "won 6 of 10 Go west.",
    ]
    assert [full_record("Go west.", record) for record in RECORDS] == [
        "Go west.",
        "Go west.\n(It guided 4 earlier episodes, of which 3 succeeded.)",
        "Go west.\n(It guided 20 earlier episodes, of which 11 succeeded;"
        " success with it minus success without it: -25 percentage points.)",
    ]


@pytest.mark.parametrize(
    ("rendering", "advice"),
    [
        ("compact", "won 3 of 4 Go west."),
        ("full", "Go west.\n(It guided 4 earlier episodes, of which 3 succeeded.)"),
    ],
)
def test_records_are_shown_only_with_the_original_text(rendering: Rendering, advice: str) -> None:
    tasks = run_config({"tasks": {"room": task_settings(task_file("room"), rendering)}}).tasks
    with_record = chat_context(tasks, {"room": SPEC})
    without_record = with_record.without_records()
    use = ExperienceUse("e1", 1, "g1", "start")
    hit = Hit("Go west.", use, record=TrackRecord(4, 3))

    def shown(context: ChatContext, hit: Hit) -> str:
        opening = context.opening(
            Task("room", 0, "train", "Find it."), Observation("A room."), [hit]
        )
        return next(segment.text for segment in opening if segment.origin == "experience")

    assert advice in shown(with_record, hit)
    assert advice not in shown(without_record, hit)
    for other in (replace(use, how="ask"), replace(use, verdict="refine")):
        assert shown(with_record, replace(hit, use=other)) == shown(without_record, hit), (
            "a reworded experience has no record"
        )


# ── complementary and its switches ────────────────────────────────────────────────────────────────


def config(tmp_path: Path, **sections: dict) -> RunConfig:
    (bank := tmp_path / "bank.sqlite").touch()
    if sections.get("bank", {}).get("frozen"):
        sections["bank"]["init"] = str(bank)
    return run_config({"tasks": {"room": task_settings(task_file("room"), "compact")}, **sections})


def build_method(tmp_path: Path, method=complementary, **sections: dict) -> Method:
    settings = config(tmp_path, **sections)
    return method.build(settings, settings.method_settings, ChatContext({"room": ""}))


def count_guided(method: Method, members: int = 8) -> int:
    task = Task("room", 0, "train", "Find it.")
    return sum(plan.condition == "guided" for plan in method.planner.plan(task, members, 0))


def test_complementary(tmp_path: Path) -> None:
    method = build_method(tmp_path)
    assert count_guided(method) == 4
    assert method.actor.terms == (SplitAdvantage("std"),)
    assert method.distiller == EveryEpisode()
    assert method.extractor is not None
    assert (method.extractor.batch, method.extractor.loss) == (64, CispoLoss(0.1, 0.1))


def test_grpo_has_no_experience(tmp_path: Path) -> None:
    method = build_method(tmp_path, grpo)
    assert (count_guided(method), method.actor.terms) == (0, (GroupAdvantage("std"),))
    assert (method.distiller, method.extractor) == (None, None)


def test_an_untrained_extractor_still_distils(tmp_path: Path) -> None:
    method = build_method(tmp_path, extractor={"train": False})
    assert (method.distiller, method.extractor, count_guided(method)) == (EveryEpisode(), None, 4)


def test_a_frozen_bank_is_searched_but_not_written(tmp_path: Path) -> None:
    method = build_method(tmp_path, bank={"frozen": True})
    assert (method.distiller, method.extractor, count_guided(method)) == (NoEpisode(), None, 4)


def test_all_members_may_be_guided(tmp_path: Path) -> None:
    method = build_method(tmp_path, complementary={"guided_share": 1.0})
    assert (count_guided(method), count_guided(method, 7)) == (8, 7)
    assert method.distiller == EveryEpisode()


def test_advantages_may_cross_the_conditions(tmp_path: Path) -> None:
    method = build_method(
        tmp_path, complementary={"advantages": "cross"}, actor={"advantage_scale": "none"}
    )
    assert method.actor.terms == (GroupAdvantage("none"),)
    assert count_guided(method) == 4


def test_lift_coef_adds_a_second_advantage_term(tmp_path: Path) -> None:
    method = build_method(tmp_path, complementary={"lift_coef": 0.5})
    assert method.actor.terms == (SplitAdvantage("std"), LiftAdvantage(0.5))


def test_self_distillation_is_part_of_the_actor_role(tmp_path: Path) -> None:
    assert build_method(tmp_path).actor.distillation is None
    assert build_method(
        tmp_path, complementary={"self_distillation": 0.5}
    ).actor.distillation == SelfDistillation(0.5)
    assert build_method(
        tmp_path, complementary={"self_distillation": 0.5, "self_distillation_every": 4}
    ).actor.distillation == SelfDistillation(0.5, 4)


def test_the_extractors_settings_reach_its_role(tmp_path: Path) -> None:
    method = build_method(tmp_path, extractor={"batch": 5, "clip_low": 0.3, "clip_high": 0.4})
    assert method.extractor is not None
    assert (method.extractor.batch, method.extractor.loss) == (5, CispoLoss(0.3, 0.4))


def test_the_actor_is_the_same_in_both(tmp_path: Path) -> None:
    ours, baseline = build_method(tmp_path), build_method(tmp_path, grpo)
    assert (ours.actor.loss, ours.actor.view, ours.shaper) == (
        baseline.actor.loss,
        baseline.actor.view,
        baseline.shaper,
    )
