"""Methods: what `complementary` and its switches are made of, and that each part computes what its equation says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doors import TASK

from crl.config.catalog import task_file
from crl.config.load import task_settings
from crl.config.schema import RunConfig
from crl.envs.base import Rendering
from crl.envs.room import SPEC
from crl.manager import DistilRequest
from crl.methods import complementary, grpo
from crl.methods.parts.distilling import CompactDistilPrompt, EveryEpisode, NoEpisode, whole_text
from crl.methods.parts.records import compact_record, full_record
from crl.methods.parts.rollouts import ChatContext, GuidedShare
from crl.methods.parts.training import CispoLoss, GroupAdvantage, ListeningAdvantage, SelfDistillation, SplitAdvantage
from crl.protocols import Hit, Method
from crl.run.context import chat_context
from crl.types import Condition, ExperienceUse, Observation, Segment, Task, TrackRecord, Trajectory

# ── who is guided ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("share", "members", "guided"), [(0.5, 8, 4), (0.6, 5, 3), (0.29, 100, 29), (0.5, 2, 1), (0.0, 8, 0), (1.0, 8, 8), (1.0, 3, 3)]
)
def test_the_first_members_of_a_group_are_guided(share: float, members: int, guided: int) -> None:
    conditions = [plan.condition for plan in GuidedShare(share).plan(TASK, members, step=0)]
    assert conditions == ["guided"] * guided + ["free"] * (members - guided)


# ── advantages ──────────────────────────────────────────────────────────────────────────────────────────────────────


def played(group: int, condition: Condition, reward: float) -> Trajectory:
    return Trajectory(TASK, 0, group, 0, condition, reward=reward, success=reward > 0)


BATCH = [
    played(0, "guided", 1.0), played(0, "guided", 0.0), played(0, "free", 0.0), played(0, "free", 0.0),
    played(1, "guided", 1.0), played(1, "guided", 1.0), played(1, "free", 1.0), played(1, "free", 0.0),
]  # fmt: skip
"""Group 0: 1 0 | 0 0. Group 1: 1 1 | 1 0."""


@pytest.mark.parametrize(
    ("term", "by_hand"),
    [
        # within (group, condition): mean 1/2 where there is a difference, else nothing to learn
        (SplitAdvantage("none"), [0.5, -0.5, 0, 0, 0, 0, 0.5, -0.5]),
        # std of {1, 0} with ddof 1 is 1/√2
        (SplitAdvantage("std"), [0.5**0.5, -(0.5**0.5), 0, 0, 0, 0, 0.5**0.5, -(0.5**0.5)]),
        # across the group: means 1/4 and 3/4
        (GroupAdvantage("none"), [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]),
        # std of {1, 0, 0, 0} is √((9 + 1 + 1 + 1) / 16 / 3) = 1/2
        (GroupAdvantage("std"), [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5]),
    ],
)
def test_advantages_by_hand(term: SplitAdvantage | GroupAdvantage, by_hand: list[float]) -> None:
    assert term(BATCH).tolist() == pytest.approx(by_hand, abs=1e-5)


def told(group: int, member: int, lesson: str, success: bool) -> Trajectory:
    use = (ExperienceUse(lesson, 1, "g", "start"),) if lesson else ()
    return Trajectory(TASK, 0, group, member, "guided", success=success, used=use, shown=(lesson,) if lesson else ())


def alone(group: int, member: int, success: bool) -> Trajectory:
    return Trajectory(TASK, 0, group, member, "free", success=success)


def test_what_beat_the_free_members_is_distilled() -> None:
    batch = [
        # the free members' mean is 0.25: one guided member is above it, one equals it, and nothing guided the third
        told(0, 0, "a", True), told(0, 1, "a", False), told(0, 2, "", True), alone(0, 3, False), alone(0, 4, True),
        # without a free member nothing is known
        told(1, 0, "a", True),
    ]  # fmt: skip
    rewards = [0.5, 0.25, 1.0, 0.0, 0.5, 1.0]
    rewarded = [replace(t, reward=reward) for t, reward in zip(batch, rewards, strict=True)]
    assert SelfDistillation(0.5)(rewarded).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_listening_is_worth_what_an_experience_adds_to_its_group() -> None:
    batch = [
        # "a" wins 2 of 2, "b" 0 of 1, nobody guided the fourth; the free members win 1 of 4
        told(0, 0, "a", True), told(0, 1, "a", True), told(0, 2, "b", False), told(0, 3, "", True),
        alone(0, 4, True), alone(0, 5, False), alone(0, 6, False), alone(0, 7, False),
        # without a free member nothing is known
        told(1, 0, "a", True), told(1, 1, "a", False),
    ]  # fmt: skip
    assert ListeningAdvantage(2.0)(batch).tolist() == [1.5, 1.5, -0.5] + [0.0] * 7


def test_what_guidance_is_worth_is_nobodys_advantage() -> None:
    """Guided episodes win and free ones lose: across the group that is signal, within the conditions it is none."""
    batch = [played(3, "guided", 1.0), played(3, "guided", 1.0), played(3, "free", 0.0), played(3, "free", 0.0)]
    assert SplitAdvantage("std")(batch).tolist() == [0, 0, 0, 0]
    assert GroupAdvantage("none")(batch).tolist() == [0.5, 0.5, -0.5, -0.5]


# ── the extractor's loss ────────────────────────────────────────────────────────────────────────────────────────────


def cispo_of(logp: list[list[float]], advantage: list[float], *, total_tokens: int = 4) -> tuple[float, list[list[float]]]:
    """Loss and gradient; the third token of the first row is masked, and all behaviour log-probs are −1."""
    new = torch.tensor(logp, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    weights = torch.tensor([9.0, -9.0])
    loss, _ = CispoLoss(0.1, 0.2)(
        new, torch.full((2, 3), -1.0), torch.tensor(advantage), mask, weights=weights, total_tokens=total_tokens
    )  # fmt: skip
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad.tolist()


def test_cispo_by_hand() -> None:
    """−Σ clip(ρ)·A·logp / tokens: the clipped ratio is a constant, so that every kept token keeps its gradient.

    ρ = e^{−1 + 1} = 1, e^{−0.5 + 1} = 1.6487 → 1.2, and in the second row e^{−2 + 1} = 0.3679 → 0.9.
    loss = −(1·2·(−1) + 1.2·2·(−0.5) + 0.9·(−1)·(−2)) / 4 = −(−2 − 1.2 + 1.8) / 4 = 0.35
    """
    loss, gradient = cispo_of([[-1.0, -0.5, -7.0], [-2.0, -7.0, -7.0]], [2.0, -1.0])
    assert loss == pytest.approx(0.35)
    assert gradient == [pytest.approx([-2 / 4, -2.4 / 4, 0.0]), pytest.approx([0.9 / 4, 0.0, 0.0])]


def test_cispo_divides_by_the_tokens_of_the_whole_batch() -> None:
    few, _ = cispo_of([[-1.0, -0.5, -7.0], [-2.0, -7.0, -7.0]], [2.0, -1.0], total_tokens=10)
    assert few == pytest.approx(0.14)


# ── what is distilled ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_episode_is_distilled_but_those_that_could_not_be_played() -> None:
    lost = Trajectory(TASK, 0, 0, 1, "free", error="env: lost")
    assert EveryEpisode().select([*BATCH, lost]) == BATCH, "guided and free, won and lost"
    assert list(NoEpisode().select(BATCH)) == []


def test_a_compact_prompt_by_hand() -> None:
    segments = (
        Segment("user", "Open it.", "task"), Segment("user", "Go west.", "experience"), Segment("user", "A door.", "env"),
        Segment("assistant", "open", "policy"), Segment("user", "It opens.", "env"),
    )  # fmt: skip
    hint = Hit("Go west.", ExperienceUse("e1", 1, "g1", "start"))
    write = CompactDistilPrompt({"doors": whole_text})
    guided = DistilRequest("run", 0, 0, 0, TASK, segments, success=True, truncated=False, shown=(hint,))
    assert write(guided) == [Segment("user", "Open it.\nhint 1 Go west.\nA door.\nopen\nIt opens.\nsuccess", "task")]
    free = DistilRequest("run", 0, 0, 0, TASK, segments[:1] + segments[2:], success=False, truncated=True)
    assert write(free) == [Segment("user", "Open it.\nA door.\nopen\nIt opens.\nfailure", "task")]


# ── an experience's record ──────────────────────────────────────────────────────────────────────────────────────────

RECORDS = (TrackRecord(), TrackRecord(4, 3), TrackRecord(20, 11, lift=-0.254))


def test_records_as_models_are_shown_them() -> None:
    """Tiny models see a long record scaled to ten: 11 of 20 is 5.5 of 10, rounded to even."""
    assert [compact_record("Go west.", record) for record in RECORDS] == ["Go west.", "won 3 of 4 Go west.", "won 6 of 10 Go west."]
    assert [full_record("Go west.", record) for record in RECORDS] == [
        "Go west.",
        "Go west.\n(It guided 4 earlier episodes, of which 3 succeeded.)",
        "Go west.\n(It guided 20 earlier episodes, of which 11 succeeded;"
        " success with it minus success without it: -25 percentage points.)",
    ]


@pytest.mark.parametrize(
    ("rendering", "advice"),
    [("compact", "won 3 of 4 Go west."), ("full", "Go west.\n(It guided 4 earlier episodes, of which 3 succeeded.)")],
)
def test_what_an_agent_is_told_of_a_record(rendering: Rendering, advice: str) -> None:
    tasks = RunConfig.model_validate({"tasks": {"room": task_settings(task_file("room"), rendering)}}).tasks
    told, silent = (chat_context(tasks, {"room": SPEC}, records=records) for records in (True, False))
    use = ExperienceUse("e1", 1, "g1", "start")
    hit = Hit("Go west.", use, record=TrackRecord(4, 3))

    def shown(context: ChatContext, hit: Hit) -> str:
        opening = context.opening(Task("room", 0, "train", "Find it."), Observation("A room."), hit)
        return next(segment.text for segment in opening if segment.origin == "experience")

    assert advice in shown(told, hit)
    assert advice not in shown(silent, hit)
    for other in (replace(use, how="ask"), replace(use, verdict="refine")):
        assert shown(told, replace(hit, use=other)) == shown(silent, hit), "these words guided nobody before"


# ── complementary and its switches ──────────────────────────────────────────────────────────────────────────────────


def config(tmp_path: Path, **sections: dict) -> RunConfig:
    (bank := tmp_path / "bank.sqlite").touch()
    if sections.get("bank", {}).get("frozen"):
        sections["bank"]["init"] = str(bank)
    return RunConfig.model_validate({"tasks": {"room": task_settings(task_file("room"), "compact")}, **sections})


def built(tmp_path: Path, method=complementary, **sections: dict) -> Method:
    return method.build(config(tmp_path, **sections), ChatContext({"room": ""}))


def guided_of(method: Method, members: int = 8) -> int:
    task = Task("room", 0, "train", "Find it.")
    return sum(plan.condition == "guided" for plan in method.planner.plan(task, members, 0))


def test_complementary(tmp_path: Path) -> None:
    method = built(tmp_path)
    assert guided_of(method) == 4
    assert method.actor.terms == (SplitAdvantage("std"),)
    assert method.distiller == EveryEpisode()
    assert method.extractor is not None
    assert (method.extractor.batch, method.extractor.loss) == (64, CispoLoss(0.1, 0.1))


def test_grpo_has_no_experience(tmp_path: Path) -> None:
    method = built(tmp_path, grpo)
    assert (guided_of(method), method.actor.terms) == (0, (GroupAdvantage("std"),))
    assert (method.distiller, method.extractor) == (None, None)


def test_a_static_extractor_distils_all_the_same(tmp_path: Path) -> None:
    method = built(tmp_path, extractor={"train": False})
    assert (method.distiller, method.extractor, guided_of(method)) == (EveryEpisode(), None, 4)


def test_a_frozen_bank_is_searched_and_nothing_else(tmp_path: Path) -> None:
    method = built(tmp_path, bank={"frozen": True})
    assert (method.distiller, method.extractor, guided_of(method)) == (NoEpisode(), None, 4)


def test_everybody_may_be_guided(tmp_path: Path) -> None:
    method = built(tmp_path, complementary={"guided": 1.0})
    assert (guided_of(method), guided_of(method, 7)) == (8, 7)
    assert method.distiller == EveryEpisode()


def test_advantages_may_cross_the_conditions(tmp_path: Path) -> None:
    method = built(tmp_path, complementary={"advantages": "cross"}, actor={"advantage_scale": "none"})
    assert method.actor.terms == (GroupAdvantage("none"),)
    assert guided_of(method) == 4


def test_listening_is_a_second_term_of_the_advantage(tmp_path: Path) -> None:
    method = built(tmp_path, complementary={"listening": 0.5})
    assert method.actor.terms == (SplitAdvantage("std"), ListeningAdvantage(0.5))


def test_self_distillation_is_of_the_actor(tmp_path: Path) -> None:
    assert built(tmp_path).actor.distillation is None
    assert built(tmp_path, complementary={"self_distillation": 0.5}).actor.distillation == SelfDistillation(0.5)


def test_the_extractors_settings_reach_its_role(tmp_path: Path) -> None:
    method = built(tmp_path, extractor={"batch": 5, "clip_low": 0.3, "clip_high": 0.4})
    assert method.extractor is not None
    assert (method.extractor.batch, method.extractor.loss) == (5, CispoLoss(0.3, 0.4))


def test_the_actor_is_the_same_in_both(tmp_path: Path) -> None:
    ours, baseline = built(tmp_path), built(tmp_path, grpo)
    assert (ours.actor.loss, ours.actor.view, ours.shaper) == (baseline.actor.loss, baseline.actor.view, baseline.shaper)
