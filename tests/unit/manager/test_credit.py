"""Training samples of the extractor, checked with numbers worked by hand.

test_credit_corners.py checks the same rules through a real bank.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from crl.config.schema import ExtractorSection
from crl.manager.credit import ReadyUnit, batch_samples, choose_batch, masked_trace
from crl.manager.records import Generation, PendingUnit, UnitKey
from crl.types import Completion
from support.kept_sets import kept_set

SETTINGS = ExtractorSection(cooldown=3, alpha=0.5, malformed_reward=-1.0)


def ready(
    uid: str,
    total: float,
    count: int = 1,
    *,
    generation: str = "",
    span=(2, 4),
    c_train: int = 0,
    t_last: int | None = None,
) -> ReadyUnit:
    return ReadyUnit(
        PendingUnit(UnitKey(uid, 1), generation or uid, span, count, total), c_train, t_last
    )


def malformed(uid: str) -> ReadyUnit:
    return ReadyUnit(PendingUnit(UnitKey(uid, 0), uid, (0, 6), 1, -1.0), 0, None)


def generation(name: str, head: int = 2) -> Generation:
    ids = tuple(range(100, 106))
    completion = Completion(ids, tuple(-0.1 * i for i in range(1, 7)), (3, 3, 3, 4, 4, 4), "stop")
    return Generation(name, 3, (7, 8, 9), completion, head)


def names(batch: list[ReadyUnit] | None) -> list[str] | None:
    return None if batch is None else [str(unit.pending.unit) for unit in batch]


def samples(*batch: ReadyUnit, head: int = 2, step: int = 10):
    generations = {
        unit.pending.generation: generation(unit.pending.generation, head) for unit in batch
    }
    return batch_samples(batch, generations, step, SETTINGS, centred=True)


# ── choice of the units ───────────────────────────────────────────────────────────────────────────


def test_the_first_ready_units_make_the_batch():
    units = [ready("c", 1), ready("a", -1), ready("b", 1)]
    assert names(choose_batch(units, 2, 10, SETTINGS)) == ["c@1", "a@1"]
    assert choose_batch(units, 4, 10, SETTINGS) is None


def test_units_in_cooldown_are_skipped():
    units = [
        ready("trained at 8", 1, t_last=8),
        ready("trained at 7", 1, t_last=7),
        ready("never", 1),
    ]
    # 10 − 8 < 3 = δ ≤ 10 − 7
    assert names(choose_batch(units, 2, 10, SETTINGS)) == [
        "trained at 7@1",
        "never@1",
    ]
    assert choose_batch(units, 3, 10, SETTINGS) is None
    assert names(choose_batch(units, 3, 11, SETTINGS)) == [
        "trained at 8@1",
        "trained at 7@1",
        "never@1",
    ]


def test_generations_without_an_op_are_at_most_a_quarter():
    units = [malformed("x"), malformed("y"), malformed("z"), *(ready(f"m{i}", 1) for i in range(7))]
    assert names(choose_batch(units, 8, 0, SETTINGS)) == [
        "x@0",
        "y@0",
        "m0@1",
        "m1@1",
        "m2@1",
        "m3@1",
        "m4@1",
        "m5@1",
    ]
    assert names(choose_batch(units, 3, 0, SETTINGS)) == ["m0@1", "m1@1", "m2@1"]
    assert choose_batch(units[:8], 8, 0, SETTINGS) is None


# ── rewards and advantages ────────────────────────────────────────────────────────────────────────


def test_pooled_rewards_weights_and_advantages_on_worked_numbers():
    # Mean rewards r̄: a = +0.5 (3 successes of 4), b = −1, c = +1.
    # c was used for training 3 times, so its weight is w = 4^−½ = 0.5.
    # baseline = (0.5 − 1 + 0.5 · 1) / 2.5 = 0
    found = samples(
        ready("a", 2.0, 4), ready("b", -1.0), ready("c", 1.0, c_train=3, t_last=2), head=0
    )
    assert [(s.id, s.reward, s.weight) for s in found] == [
        ("a@1", 0.5, 1.0),
        ("b@1", -1.0, 1.0),
        ("c@1", 1.0, 0.5),
    ]
    assert [s.advantage for s in found] == pytest.approx([0.5, -1.0, 0.5])
    assert sum(s.advantage for s in found) == pytest.approx(0.0), "advantages sum to zero"


def test_ops_of_one_generation_share_a_head_with_their_mean_reward():
    first = ready("g#0", 1.0, generation="g", span=(2, 4), c_train=1)
    second = ready("g#1", -1.0, 2, generation="g", span=(4, 6), c_train=1)  # r̄ = −0.5
    other = ready("h#0", -1.0, generation="h", span=(2, 4))
    found = samples(first, second, other)
    assert [s.id for s in found] == ["g#0@1", "g#1@1", "h#0@1", "g@head", "h@head"]
    weight = 2**-0.5
    baseline = (weight * 1 - weight * 0.5 - 1) / (2 * weight + 1)
    assert [s.reward for s in found] == [1.0, -0.5, -1.0, 0.25, -1.0]
    assert [s.advantage for s in found] == pytest.approx(
        [
            weight * (1 - baseline),
            weight * (-0.5 - baseline),
            -1 - baseline,
            weight * (0.25 - baseline),
            -1 - baseline,
        ]
    )
    assert [s.generation for s in found] == ["g", "g", "h", "g", "h"]


def test_equal_rewards_give_zero_advantages():
    assert [s.advantage for s in samples(ready("a", 1.0), ready("b", 3.0, 3))] == [0.0] * 4


def test_relative_rewards_are_not_centred():
    """Check that relative rewards are not centred.

    Lesson "a" is right, but its place is also won without it, so its reward is 0. Centring would
    give "a" a negative advantage because of the reward of "b", which helps at another place.
    """
    units = (ready("a", 0.0), ready("b", 1.0), ready("c", -0.5, c_train=3, t_last=2))
    found = batch_samples(
        units,
        {unit.pending.generation: generation(unit.pending.generation, 0) for unit in units},
        10,
        SETTINGS,
        centred=False,
    )
    assert [s.advantage for s in found] == [0.0, 1.0, -0.25]


def test_a_generation_without_an_op_is_one_sample_over_its_span():
    found = samples(malformed("x"), ready("a", 1.0), ready("b", 1.0), ready("c", 1.0))
    assert [s.id for s in found] == ["x@0", "a@1", "b@1", "c@1", "a@head", "b@head", "c@head"]
    assert sum(found[0].trace.mask) == 6
    assert found[0].advantage == pytest.approx(-1.5)


def test_the_trace_masks_only_the_span_and_ends_with_it():
    trace = masked_trace(generation("g"), (2, 4))
    assert trace.ids == (7, 8, 9, 100, 101, 102, 103)
    assert trace.mask == (0, 0, 0, 0, 0, 1, 1)
    assert trace.logprobs == pytest.approx((0, 0, 0, 0, 0, -0.3, -0.4))
    assert trace.versions == (-1, -1, -1, -1, -1, 3, 4)
    assert trace.until_last_sampled() == trace


def test_the_trace_has_the_kept_sets_of_its_span():
    whole = generation("g")
    kept = tuple(kept_set(i) for i in range(len(whole.completion.ids)))
    truncated = replace(whole, completion=replace(whole.completion, kept=kept))
    assert masked_trace(truncated, (2, 4)).kept == (b"",) * 5 + kept[2:4]


def test_there_is_no_head_sample_without_head_tokens():
    assert [s.id for s in samples(ready("a", 1.0), head=0)] == ["a@1"]


def test_alpha_zero_leaves_every_weight_at_one():
    unit = ready("a", 1.0, c_train=99)
    assert unit.weight(10, ExtractorSection(alpha=0.0)) == 1.0
    assert math.isclose(unit.weight(10, ExtractorSection(alpha=1.0)), 0.01)
