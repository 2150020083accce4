"""Corner cases of credit and the extractor's training data in a real bank.

Expected numbers are worked by hand.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from crl.manager import ExperienceManager, ExtractorSample, GroupSuccess, UnitKey
from crl.manager.inspection.reading import open_reader
from crl.manager.storage.store import Store
from crl.protocols import Hit
from crl.types import MAX_OUTCOMES, ExperienceUse, Lift, TokenTrace, TrackRecord
from support.credited_banks import (
    ADD_EAST,
    ADD_WEST,
    ANSWER_END,
    ANSWERS,
    EAST,
    UPDATE_WEST,
    WEST,
    WINDOW_STEPS,
    distil,
    lose,
    open_bank,
    open_bank_with_two_adds,
    samples_by_id,
    train,
    win,
)
from support.doors import renderer
from support.managers import NoteEngine, hit, logged, request, search


async def merge_bank(manager: ExperienceManager, *ops: dict[str, Any]) -> str:
    """Merge the bank with this answer. Return the uid of the new entry, or "" without one."""
    assert isinstance(manager._engine, NoteEngine)
    manager._engine.merging = json.dumps(ops)
    before = set(manager._bank.entries)
    await manager.merge()
    return next(iter(set(manager._bank.entries) - before), "")


def rewards(batch: dict[str, ExtractorSample]) -> dict[str, float]:
    """Return the rewards of the ops, without the samples for the text before the ops."""
    return {name: sample.reward for name, sample in batch.items() if not name.endswith("@head")}


def advantages(batch: dict[str, ExtractorSample]) -> Any:
    return pytest.approx({name: sample.advantage for name, sample in batch.items()})


def text(trace: TokenTrace) -> str:
    """Return the text that is trained."""
    return renderer().decode(
        [token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask]
    )


async def generation_counters(
    manager: ExperienceManager, generation: str
) -> tuple[int, int | None] | None:
    """Return (c_train, t_last) of a generation, or None if the generation is not stored."""
    found = await manager._store.generations([generation])
    return (found[generation].c_train, found[generation].t_last) if found else None


async def unit_counters(manager: ExperienceManager, use: ExperienceUse) -> tuple[int, float]:
    """Return (credited, credit) of a version, even if the version is no longer active."""
    sql = "SELECT credited, credit FROM units WHERE uid = ? AND version = ?"
    ((credited, credit),) = await manager._store._database.rows(sql, (use.uid, use.version))
    return credited, credit


# ── old generations ───────────────────────────────────────────────────────────────────────────────


async def test_an_old_generation_is_trained_as_it_was_sampled(tmp_path):
    engine = NoteEngine(ANSWERS, version=3)
    manager = await open_bank_with_two_adds(tmp_path, engine=engine)
    await manager.aclose()
    engine.version = 40
    reopened = await open_bank(tmp_path, engine)
    reopened.advance(500)
    await reopened.drain()
    payloads = await reopened._store._database.rows("SELECT payload FROM requests")
    assert [row["payload"] for row in payloads] == [None, None]
    await win(reopened, WEST.use, "run/500/0/0")
    batch = await samples_by_id(reopened, 1, 500)
    trace = batch["run/0/0/0#0@1"].trace
    sampled = [i for i, mask in enumerate(trace.mask) if mask]
    assert {trace.logprobs[i] for i in sampled} == {-4.0}, (
        "−1 − 3: log-probs of version 3, not of version 40"
    )
    assert {trace.versions[i] for i in sampled} == {3}
    assert text(trace) == ADD_WEST + ANSWER_END
    (generation,) = (await reopened._store.generations(["run/0/0/0"])).values()
    assert generation.extractor == 3
    await reopened.aclose()


async def update_entry(manager: ExperienceManager) -> None:
    await distil(manager, request(10, note="better", shown=(WEST,)))


async def evict(manager: ExperienceManager) -> None:
    await distil(manager, request(10, note="north"))  # the bound is two, so the oldest is evicted


async def discard(manager: ExperienceManager) -> None:
    await merge_bank(manager, {"op": "discard", "target": 1})


async def merge_away(manager: ExperienceManager) -> None:
    await merge_bank(manager, {"op": "merge", "targets": [1, 2], "text": "Go west, then east."})


@pytest.mark.parametrize("end_version", [update_entry, evict, discard, merge_away])
@pytest.mark.parametrize(
    ("steps_later", "trained"), [(WINDOW_STEPS, True), (WINDOW_STEPS + 1, False)]
)
async def test_an_inactive_version_earns_credit_within_the_credit_window(
    tmp_path, end_version, steps_later, trained
):
    manager = await open_bank_with_two_adds(tmp_path, max_per_goal=2)
    manager.advance(10)
    for group in range(9):  # until each entry has guided
        await manager.search([search(group=group)])
    await end_version(manager)
    assert (WEST.use.uid, 1) not in {
        (uid, entry.version) for uid, entry in manager._bank.entries.items()
    }
    manager.advance(10 + steps_later)
    await manager.drain()
    await win(manager, WEST.use, "run/10/0/0")
    assert rewards(await samples_by_id(manager, 1, 10 + steps_later)) == (
        {"run/0/0/0#0@1": 1.0} if trained else {}
    )
    assert await unit_counters(manager, WEST.use) == (1, 1.0), (
        "credit is counted for the version in both cases"
    )
    await manager.aclose()


async def test_pending_rewards_are_trained_before_their_generation_is_deleted(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path)
    await lose(manager, WEST.use, "run/1/0/0")
    await distil(manager, request(1, note="better", shown=(WEST,)))
    manager.advance(1000)
    await manager.drain()
    assert rewards(await train(manager, 1, 1000)) == {"run/0/0/0#0@1": -1.0}
    assert await generation_counters(manager, "run/0/0/0") == (1, 1000)
    await manager.drain()
    assert await generation_counters(manager, "run/0/0/0") is None
    await manager.aclose()


# ── pooled units ──────────────────────────────────────────────────────────────────────────────────


async def test_each_training_uses_the_mean_over_the_episodes_since_the_last_one(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    await win(manager, WEST.use, "before 1", "before 2")
    await lose(manager, WEST.use, "before 3")
    batch = await samples_by_id(manager, 1, 5)
    assert rewards(batch) == pytest.approx({"run/0/0/0#0@1": 1 / 3})  # (1 + 1 − 1) / 3
    await lose(manager, WEST.use, "while it is trained 1", "while it is trained 2")
    assert batch["run/0/0/0#0@1"].reward == pytest.approx(1 / 3)
    await win(manager, EAST.use, "another's")
    await manager.mark_trained(list(batch), 5)
    await win(manager, WEST.use, "after")
    # The unit becomes ready again when it is marked, so it is behind the other: (−1 − 1 + 1) / 3
    assert list(rewards(await samples_by_id(manager, 2, 5)).items()) == [
        ("run/0/1/0#0@1", 1.0),
        ("run/0/0/0#0@1", pytest.approx(-1 / 3)),
    ]
    await train(manager, 2, 5)
    assert await manager.take_batch(1, 99) is None, "each episode is trained on once"
    assert await unit_counters(manager, WEST.use) == (6, 0.0)
    await manager.aclose()


async def test_an_episode_counts_once_per_unit(
    tmp_path,
):
    manager = await open_bank_with_two_adds(tmp_path)
    await asyncio.gather(*(manager.credit([WEST.use], True, episode="run/1/0/0") for _ in range(3)))
    await manager.credit([WEST.use], False, episode="run/1/0/0")  # another outcome is ignored too
    await manager.credit([WEST.use, EAST.use, WEST.use], False, episode="run/1/0/1")
    # WEST: (1 − 1) / 2
    assert rewards(await samples_by_id(manager, 2, 1)) == {
        "run/0/0/0#0@1": 0.0,
        "run/0/1/0#0@1": -1.0,
    }
    assert (await unit_counters(manager, WEST.use), await unit_counters(manager, EAST.use)) == (
        (2, 0.0),
        (1, -1.0),
    )
    entry = manager._bank.entries[WEST.use.uid]
    assert (entry.counters.credited, entry.counters.credit) == (2, 0.0)
    await manager.aclose()


# ── cooldown ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("credit", "weights"),
    [
        (
            {"cooldown": 2, "alpha": 0.5},
            [(4, 1.0), (5, None), (6, 2**-0.5), (7, None), (8, 3**-0.5)],
        ),
        ({"cooldown": 0, "alpha": 0.5}, [(4, 1.0), (4, 2**-0.5), (4, 3**-0.5), (9, 0.5)]),  # 4^−½
        (
            {"cooldown": 3, "alpha": 1.0},
            [(0, 1.0), (1, None), (2, None), (3, 0.5), (5, None), (9, 1 / 3)],
        ),
        ({"cooldown": 1, "alpha": 0.0}, [(7, 1.0), (7, None), (8, 1.0)]),
        ({"cooldown": 2, "alpha": 2.0}, [(1, 1.0), (3, 0.25), (5, 1 / 9)]),
    ],
)
async def test_the_weight_at_each_step(tmp_path, credit, weights):
    """Check the weight w at each step, or that the unit waits (None).

    One episode is won before each step.
    """
    manager = await open_bank_with_two_adds(tmp_path, **credit)
    waiting, trainings, last = 0, 0, None
    for number, (step, weight) in enumerate(weights):
        await win(manager, WEST.use, f"won {number}")
        waiting += 1
        batch = await train(manager, 1, step)
        assert bool(batch) == (weight is not None)
        if batch:
            trainings, last = trainings + 1, step
            assert [sample.weight for sample in batch.values()] == pytest.approx(
                [weight, weight]
            ), "the op and the head"
            sql = (
                "SELECT data ->> 'count' FROM log WHERE kind = 'train' AND data != '{}' ORDER "
                "BY seq DESC LIMIT 1"
            )
            assert (await manager._store._database.rows(sql))[0][0] == waiting, (
                "waiting rewards are trained with the others"
            )
            waiting = 0
        assert await generation_counters(manager, "run/0/0/0") == (trainings, last), (
            "a waiting unit changes no counter"
        )
    await manager.aclose()


async def test_the_cooldown_applies_to_all_units_of_a_generation(tmp_path):
    manager = await open_bank(tmp_path, cooldown=2)
    await distil(manager, request(note="two"), request(group=1, note="north"))
    first, second, other = hit("run/0/0/0#0").use, hit("run/0/0/0#1").use, hit("run/0/1/0#0").use
    await win(manager, first, "1")
    await train(manager, 1, 4)
    await lose(manager, second, "2")  # another op of the same generation waits too
    await win(manager, other, "3")
    assert await manager.take_batch(2, 5) is None
    assert rewards(await samples_by_id(manager, 1, 5)) == {"run/0/1/0#0@1": 1.0}
    batch = await samples_by_id(manager, 2, 6)
    assert rewards(batch) == {"run/0/0/0#1@1": -1.0, "run/0/1/0#0@1": 1.0}, (
        "this unit became ready first"
    )
    # w = 2^−½ and 1; baseline = (1 − 2^−½) / (1 + 2^−½) = 0.17157
    # A = 2^−½ · (−1.17157) and 0.82843
    assert advantages(batch) == {
        "run/0/0/0#1@1": -0.828427,
        "run/0/0/0@head": -0.828427,
        "run/0/1/0#0@1": 0.828427,
        "run/0/1/0@head": 0.828427,
    }
    await manager.aclose()


# ── several ops of one generation ─────────────────────────────────────────────────────────────────


def trained_positions(sample: ExtractorSample) -> set[int]:
    return {i for i, mask in enumerate(sample.trace.mask) if mask}


async def test_each_op_of_an_answer_is_trained_on_its_own_tokens(tmp_path):
    manager = await open_bank(tmp_path)
    await distil(manager, request(note="two"))
    await win(manager, hit("run/0/0/0#0").use, "1", "2", "3")
    await lose(manager, hit("run/0/0/0#0").use, "4")
    await lose(manager, hit("run/0/0/0#1").use, "5")
    batch = await train(manager, 2, 1)
    # r̄ = (3 − 1) / 4 and −1. The head has their mean, which is also the baseline: (0.5 − 1) / 2
    assert {name: (s.reward, s.advantage) for name, s in batch.items()} == {
        "run/0/0/0#0@1": (0.5, 0.75), "run/0/0/0#1@1": (-1.0, -0.75), "run/0/0/0@head": (-0.25, 0.0)
    }  # fmt: skip
    first, second, head = batch.values()
    assert (text(head.trace), text(first.trace)) == (
        "It went west, then east.</think>\n[",
        ADD_WEST,
    )
    assert text(second.trace).endswith(ADD_EAST[1:] + ANSWER_END)
    positions = [trained_positions(sample) for sample in (head, first, second)]
    assert len(set.union(*positions)) == sum(map(len, positions)), "no token is trained twice"
    assert max(positions[0]) + 1 == min(positions[1])
    assert await generation_counters(manager, "run/0/0/0") == (1, 1), (
        "one training for all samples of the generation"
    )
    await manager.aclose()


async def test_an_op_without_credit_is_not_in_the_batch(tmp_path):
    manager = await open_bank(tmp_path)
    await distil(manager, request(note="two"), request(group=1, note="north"))
    await win(manager, hit("run/0/0/0#1").use, "1")
    await lose(manager, hit("run/0/1/0#0").use, "2")
    batch = await samples_by_id(manager, 2, 1)
    assert advantages(batch) == {
        "run/0/0/0#1@1": 1.0,
        "run/0/1/0#0@1": -1.0,
        "run/0/0/0@head": 1.0,
        "run/0/1/0@head": -1.0,
    }
    assert ADD_WEST in renderer().decode(batch["run/0/0/0#1@1"].trace.ids), (
        "the first op is context of the second"
    )
    assert ADD_WEST not in "".join(text(sample.trace) for sample in batch.values())
    await manager.aclose()


async def test_an_update_and_an_add_of_one_answer_are_two_units_of_one_generation(tmp_path):
    manager = await open_bank(tmp_path)
    await distil(manager, request(note="west"))
    await distil(manager, request(1, note="both", shown=(WEST,)))
    await win(manager, hit("run/0/0/0#0", 2).use, "1")
    await lose(manager, hit("run/1/0/0#1").use, "2")
    batch = await train(manager, 2, 3)
    assert {name: (s.generation, s.advantage) for name, s in batch.items()} == {
        "run/0/0/0#0@2": ("run/1/0/0", 1.0),
        "run/1/0/0#1@1": ("run/1/0/0", -1.0),
        "run/1/0/0@head": ("run/1/0/0", 0.0),
    }  # fmt: skip
    assert (text(batch["run/0/0/0#0@2"].trace), text(batch["run/1/0/0#1@1"].trace)) == (
        UPDATE_WEST,
        ADD_EAST + ANSWER_END,
    )
    assert (
        await generation_counters(manager, "run/1/0/0"),
        await generation_counters(manager, "run/0/0/0"),
    ) == (
        (1, 3),
        None,
    ), "version 1 can earn no more credit"
    await manager.aclose()


async def test_the_end_of_an_answer_is_trained_with_the_last_op_only(tmp_path):
    """Check that text after the last op is trained with it, because it closes the answer.

    The text is not trained if a rejected op follows.
    """
    answers = {
        "fenced": f"```json\n[{ADD_WEST}]\n```\nI hope this helps!",
        "worse": f'[{ADD_WEST}, {{"op": "drop"}}]',
        "back": f'[{ADD_WEST}, {{"op": "return"}}]',
    }
    manager = await open_bank(tmp_path, NoteEngine(answers))
    for group, note in enumerate(answers):
        await distil(manager, request(group=group, note=note))
        await win(manager, hit(f"run/0/{group}/0#0").use, note)
    batch = await samples_by_id(manager, 3, 1)
    assert [
        text(batch[f"run/0/{group}/0#0@1"].trace).partition(ADD_WEST[-6:])[2]
        for group in range(3)
    ] == [
        "]\n```\nI hope this helps!<|im_end|>", "", "",
    ]  # fmt: skip
    await manager.aclose()


async def test_a_truncated_answer_has_no_trained_end(tmp_path):
    answer = f"[{ADD_WEST}, and now I would like to add that"
    limit = len(renderer().encode(answer))
    manager = await open_bank(tmp_path, NoteEngine({"long": answer}), max_tokens=limit)
    await distil(manager, request(note="long"))
    await win(manager, WEST.use, "1")
    assert text((await samples_by_id(manager, 1, 1))["run/0/0/0#0@1"].trace) == ADD_WEST
    await manager.aclose()


async def test_a_return_earns_no_credit(tmp_path):
    manager = await open_bank(tmp_path, malformed_reward=-1.0)
    await distil(manager, request(note="none"), request(group=1, note="after"))
    assert (await manager.stats()).items() >= {
        "generations": 1,
        "buffer/ready": 0,
        "ops/return": 2,
    }.items()
    await manager.credit([hit("run/0/0/0#0").use], True, episode="stray")
    await win(manager, hit("run/0/1/0#1").use, "1")
    batch = await samples_by_id(manager, 1, 1)
    assert {name: text(sample.trace) for name, sample in batch.items()} == {
        "run/0/1/0#1@1": ADD_EAST + ANSWER_END,
        "run/0/1/0@head": "[",
    }
    await manager.credit([], True, episode="free")
    assert (await manager.stats()).items() >= {
        "ops/credit": 1,
        "ops/stray": 1,
        "buffer/ready": 1,
    }.items()
    await manager.aclose()


# ── updates, merges ───────────────────────────────────────────────────────────────────────────────


async def test_credit_belongs_to_the_version_that_guided(tmp_path):
    manager = await open_bank(tmp_path)
    await distil(manager, request(note="west"))
    (guide,) = await manager.search([search()])
    assert guide is not None
    await win(manager, guide.use, "run/1/0/0")
    await distil(manager, request(1, note="better", shown=(guide,)))
    entry = manager._bank.entries["run/0/0/0#0"]
    assert (
        entry.version,
        entry.counters.retrieved,
        entry.counters.last_returned_step,
        entry.counters.credited,
        entry.counters.credit,
    ) == (2, 0, None, 0, 0.0)
    await win(
        manager, guide.use, "run/1/0/1", "run/1/0/2"
    )  # these episodes began before the update
    await lose(manager, guide.use, "run/1/0/3")
    await lose(manager, hit(entry.uid, 2).use, "run/2/0/0")
    batch = await samples_by_id(manager, 2, 3)
    # r̄ = (3 − 1) / 4 and −1, baseline −0.25
    assert {name: (s.generation, s.reward) for name, s in batch.items() if "#" in name} == {
        "run/0/0/0#0@1": ("run/0/0/0", 0.5), "run/0/0/0#0@2": ("run/1/0/0", -1.0)
    }  # fmt: skip
    assert advantages(batch) == {
        "run/0/0/0#0@1": 0.75,
        "run/0/0/0#0@2": -0.75,
        "run/0/0/0@head": 0.75,
        "run/1/0/0@head": -0.75,
    }
    assert (entry.counters.credited, entry.counters.credit) == (1, -1.0)
    await manager.aclose()


async def test_a_merged_entry_starts_without_credit_and_its_parents_keep_theirs(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path)
    await win(manager, WEST.use, "1")
    await lose(manager, EAST.use, "2", "3")
    await win(manager, EAST.use, "4")
    uid = await merge_bank(
        manager, {"op": "merge", "targets": [1, 2], "text": "Go west, then east."}
    )
    name = uid.partition("#")[0]
    entry = manager._bank.entries[uid]
    assert (entry.counters.credited, entry.counters.credit, entry.counters.retrieved) == (0, 0.0, 0)
    await lose(manager, hit(uid).use, "5")
    manager.advance(99)
    await manager.drain()
    batch = await train(manager, 3, 99)
    # r̄ = 1, −1/3 and −1, so the baseline is −1/9
    assert {i: s for i, s in batch.items() if "#" in i}.keys() == {
        "run/0/0/0#0@1",
        "run/0/1/0#0@1",
        f"{uid}@1",
    }
    assert advantages(batch) == {
        "run/0/0/0#0@1": 10 / 9, "run/0/1/0#0@1": -2 / 9, f"{uid}@1": -8 / 9,
        "run/0/0/0@head": 10 / 9, "run/0/1/0@head": -2 / 9, f"{name}@head": -8 / 9,
    }  # fmt: skip
    assert (
        text(batch[f"{uid}@1"].trace)
        == '{"op": "merge", "targets": [1, 2], "text": "Go west, then east."}' + ANSWER_END
    )
    await manager.drain()
    assert [await generation_counters(manager, g) for g in ("run/0/0/0", "run/0/1/0", name)] == [
        None,
        None,
        (1, 99),
    ]
    await manager.aclose()


async def test_a_discarded_entry_is_trained_on_its_credit(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path)
    await lose(manager, WEST.use, "1")
    assert await merge_bank(manager, {"op": "discard", "target": 1}) == ""
    manager.advance(99)
    await manager.drain()
    assert rewards(await train(manager, 1, 99)) == {"run/0/0/0#0@1": -1.0}
    assert (await manager.stats())["buffer/ready"] == 0, "a discard earns no credit"
    await manager.aclose()


# ── generations without an op ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("reward", "advantage"), [(-1.0, -1.5), (-0.2, -0.9), (0.0, -0.75)])
async def test_at_most_a_quarter_of_a_batch_is_malformed(tmp_path, reward, advantage):
    manager = await open_bank(tmp_path, malformed_reward=reward, cooldown=0)
    bad = [request(member=m, note="bad") for m in range(3)]
    await distil(manager, *bad, *(request(group=1, member=m, note="north") for m in range(3)))
    assert (await manager.stats()).items() >= {"ops/malformed": 3, "buffer/ready": 3}.items()
    for repeat in range(3):
        for member in range(3):
            await win(manager, hit(f"run/0/1/{member}#0").use, f"{repeat} {member}")
        batch = await train(manager, 4, 1)
        assert list(rewards(batch)) == [
            f"run/0/0/{repeat}@0",
            "run/0/1/0#0@1",
            "run/0/1/1#0@1",
            "run/0/1/2#0@1",
        ]
        if repeat == 0:  # the baseline is (reward + 3) / 4
            assert batch["run/0/0/0@0"].advantage == pytest.approx(advantage)
        assert text(batch[f"run/0/0/{repeat}@0"].trace) == "H", (
            "no usable answer starts with this token"
        )
    await manager.drain()
    assert (await manager.stats()).items() >= {"generations": 3, "buffer/ready": 0}.items(), (
        "trained malformed generations can earn no more credit"
    )
    await manager.aclose()


@pytest.mark.parametrize(
    ("answer", "truncated", "trained_text"),
    [
        ("Hm.", False, "H"),
        ('[{"op":"advise","text":"Go west."}]', False, "v"),
        ('[{"op":"update","target":1,"text":"Go west."}]', False, "up"),
        ('[{"op":"add","text":"Go we', False, "<|im_end|>"),
        ('[{"op":"add","text":"Go we', True, " we"),
        ('[{"op":"add","text":Go we', True, "G"),
        ("<think>West", False, "<|im_end|>"),
    ],
)
async def test_the_trained_token_of_a_malformed_answer(tmp_path, answer, truncated, trained_text):
    """Check which token of an answer without a usable op is trained.

    Usable answers may begin with the same tokens, and the text after the token may look usable. An
    answer that the token limit cuts has no end. Its last token is trained instead.
    """
    limit = {"max_tokens": len(renderer().encode(answer))} if truncated else {}
    manager = await open_bank(tmp_path, NoteEngine({"odd": answer}), malformed_reward=-1.0, **limit)
    await distil(manager, request(note="odd"))
    (unit,) = await manager._store.ready_units()
    (generation,) = (await manager._store.generations(["run/0/0/0"])).values()
    start, stop = unit.pending.span
    assert stop == start + 1
    tokens = [renderer().decode([token]) for token in generation.completion.ids]
    assert tokens[start].startswith(trained_text)
    assert (
        "".join(tokens[:start]) + trained_text
        == (answer + "<|im_end|>")[: len("".join(tokens[:start]) + trained_text)]
    )
    await manager.aclose()


async def test_at_most_one_batch_of_malformed_answers_is_pending(tmp_path):
    manager = await open_bank(tmp_path, malformed_reward=-1.0, cooldown=0)
    await distil(
        manager,
        *(request(member=m, note="bad") for m in range(6)),
        *(request(group=1, member=m, note="north") for m in range(3)),
    )
    assert await manager.take_batch(4, 1) is None
    metrics = await manager.stats()
    assert (
        metrics.items()
        >= {"buffer/ready": 4, "ops/malformed": 6, "dropped/too many malformed": 2}.items()
    )
    assert await manager.take_batch(4, 1) is None
    assert (await manager.stats())["dropped/too many malformed"] == 2, (
        "the remaining units fit into a batch"
    )
    await manager.drain()
    assert (await manager.stats())["generations"] == 4 + 3, "dropped generations are deleted"
    for member in range(3):
        await win(manager, hit(f"run/0/1/{member}#0").use, f"{member}")
    assert "run/0/0/2@0" in await train(manager, 4, 1), "the oldest of the last four"
    await manager.aclose()


# ── verdicts ──────────────────────────────────────────────────────────────────────────────────────


async def test_verdicts_change_training_rewards_but_not_recorded_credit(tmp_path):
    """Check training rewards and recorded credit of verdicts, worked by hand.

    * WEST: accepted and won 2, accepted and lost 0, rejected 0, unjudged and lost −1: mean 1/4.
      WEST guided three of the four episodes, of which one was won.
    * EAST: refined and lost −1/2.
    """
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    accepted, rejected = replace(WEST.use, verdict="accept"), replace(WEST.use, verdict="reject")
    credits = [
        (accepted, True),
        (accepted, False),
        (rejected, True),
        (WEST.use, False),
        (replace(EAST.use, verdict="refine"), False),
    ]
    for _ in range(2):  # repeating the credits changes nothing
        for episode, (use, success) in enumerate(credits):
            await manager.credit([use], success, episode=f"e{episode}")
    assert rewards(await samples_by_id(manager, 2, 5)) == {
        "run/0/0/0#0@1": 0.25,
        "run/0/1/0#0@1": -0.5,
    }
    assert (await unit_counters(manager, WEST.use), await unit_counters(manager, EAST.use)) == (
        (3, -1.0),
        (1, -1.0),
    )
    assert {
        uid: (entry.counters.credited, entry.counters.credit)
        for uid, entry in manager._bank.entries.items()
    } == {
        WEST.use.uid: (3, -1.0),
        EAST.use.uid: (1, -1.0),
    }
    await manager.aclose()
    with open_reader(tmp_path / "bank.sqlite") as bank:
        assert [use.reward for use in bank.uses(WEST.use.uid)] == [1.0, -1.0, -1.0]


async def test_the_expected_reward_is_subtracted_from_the_training_reward_only(tmp_path):
    """Check that the expected reward is subtracted from the training reward only.

    * WEST guided two episodes. The first was won where half of the others in the group won, and the
      second was lost where none of them won: (1 − 0 − 1 + 1) / 2.
    * EAST was accepted by a critic: 2 − 0.5. Then EAST was rejected: 0, regardless of the outcome.
    """
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    await manager.credit([WEST.use], True, episode="a", expected=0.0)
    await manager.credit([WEST.use], False, episode="b", expected=-1.0)
    await manager.credit([replace(EAST.use, verdict="accept")], True, episode="c", expected=0.5)
    await manager.credit([replace(EAST.use, verdict="reject")], True, episode="d", expected=0.5)
    assert rewards(await samples_by_id(manager, 2, 5)) == {
        "run/0/0/0#0@1": 0.5,
        "run/0/1/0#0@1": 0.75,
    }
    assert (await unit_counters(manager, WEST.use), await unit_counters(manager, EAST.use)) == (
        (2, 0.0),
        (1, 1.0),
    )
    await manager.aclose()


async def test_a_group_changes_a_lift_once(tmp_path):
    """Check that a group changes a lift once, and that unknown units are ignored.

    Lifts of 1/2 and −1/4: mean 1/8, m2 = 2 · (3/8)². A lift is neither trained on nor counted as
    credit.
    """
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    west = UnitKey.credited_by(WEST.use)
    unknown = GroupSuccess(UnitKey("nobody", 1), 1.0, 0.0)
    first, second = GroupSuccess(west, 1.0, 0.5), GroupSuccess(west, 0.25, 0.5)
    await asyncio.gather(*(manager.record_lifts({"run/1/0": [unknown, first]}) for _ in range(3)))
    # A second lift of group run/1/0 is ignored too.
    await manager.record_lifts(
        {"run/1/0": [unknown, GroupSuccess(west, 0.0, 1.0)], "run/1/1": [second]}
    )
    await manager.record_lifts({})
    assert manager._bank.entries[west.uid].counters.lift == Lift(2, 0.125, 2 * 0.375**2)
    assert manager._bank.entries[west.uid].counters.record == TrackRecord(0, 0, 0.125)
    assert [origin for origin, _ in logged(tmp_path / "bank.sqlite", "lift")] == [
        "run/1/0",
        "run/1/1",
    ]
    assert await manager.take_batch(1, 5) is None
    assert await unit_counters(manager, WEST.use) == (0, 0.0)
    await manager.aclose()


async def test_a_lift_belongs_to_one_version_and_is_rolled_back(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    await manager.record_lifts({"run/1/0": [GroupSuccess(UnitKey(WEST.use.uid, 1), 1.0, 0.0)]})
    before = await manager.snapshot()
    await manager.record_lifts({"run/1/1": [GroupSuccess(UnitKey(WEST.use.uid, 1), 0.0, 1.0)]})
    await update_entry(manager)
    await manager.record_lifts(
        {
            "run/11/0": [
                GroupSuccess(UnitKey(WEST.use.uid, 1), 0.0, 1.0),
                GroupSuccess(UnitKey(WEST.use.uid, 2), 0.5, 0.0),
            ]
        }
    )
    assert manager._bank.entries[WEST.use.uid].counters.lift == Lift(1, 0.5)
    await manager.rollback(before)
    assert manager._bank.entries[WEST.use.uid].counters.lift == Lift(1, 1.0)
    # After the rollback, this group has not been recorded yet.
    await manager.record_lifts({"run/1/1": [GroupSuccess(UnitKey(WEST.use.uid, 1), 1.0, 1.0)]})
    await manager.export_copy(tmp_path / "copy.sqlite")
    await manager.aclose()
    for path in (tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"):
        store = await Store.open(path)
        entries = {entry.uid: entry.counters.lift for entry, _ in await store.entries()}
        assert entries == {WEST.use.uid: Lift(2, 0.5, 0.5), EAST.use.uid: None}
        await store.aclose()


async def test_outcomes_are_kept_in_order(tmp_path):
    """Check the outcomes of an entry in memory, after a rollback and in a reopened copy.

    A reject is no outcome, a new version starts without outcomes, and only the last ones are kept.
    """

    def outcomes(bank: ExperienceManager, hit: Hit) -> tuple[float, ...]:
        return bank._bank.entries[hit.use.uid].counters.outcomes

    manager = await open_bank_with_two_adds(tmp_path)
    for episode in ("a", "b"):
        await lose(manager, WEST.use, episode)
    await win(manager, WEST.use, "c")
    await manager.credit([replace(WEST.use, verdict="reject")], True, episode="d")
    await win(manager, WEST.use, "c")
    before = await manager.snapshot()
    await lose(manager, WEST.use, "e")
    assert outcomes(manager, WEST) == (-1.0, -1.0, 1.0, -1.0)
    await manager.rollback(before)
    assert outcomes(manager, WEST) == (-1.0, -1.0, 1.0)
    await update_entry(manager)
    assert outcomes(manager, WEST) == ()
    for number in range(MAX_OUTCOMES + 1):
        await (lose if number % 3 else win)(manager, EAST.use, f"many/{number}")
    expected = tuple(-1.0 if number % 3 else 1.0 for number in range(1, MAX_OUTCOMES + 1))
    assert outcomes(manager, EAST) == expected
    await manager.export_copy(tmp_path / "copy.sqlite")
    await manager.aclose()
    store = await Store.open(tmp_path / "copy.sqlite")
    found = {entry.uid: entry.counters.outcomes for entry, _ in await store.entries()}
    assert found == {WEST.use.uid: (), EAST.use.uid: expected}
    await store.aclose()


async def test_credit_without_an_expected_reward_is_recorded_but_not_trained_on(tmp_path):
    """Check that credit without an expected reward is recorded but not trained on.

    None means that no unguided member is known to have played. A rejected experience has r̃ = 0 for
    any expected reward.
    """
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    await manager.credit([WEST.use], True, episode="a", expected=None)
    assert await manager._store.ready_units() == []
    await manager.credit([WEST.use], True, episode="b", expected=0.5)
    await manager.credit([replace(EAST.use, verdict="reject")], True, episode="c", expected=None)
    assert rewards(await samples_by_id(manager, 2, 5)) == {
        "run/0/0/0#0@1": 0.5,
        "run/0/1/0#0@1": 0.0,
    }
    assert (await unit_counters(manager, WEST.use), await unit_counters(manager, EAST.use)) == (
        (2, 2.0),
        (0, 0.0),
    )
    await manager.aclose()


async def test_a_rejected_experience_is_trained_on_without_recorded_credit(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    before = await manager.snapshot()
    await manager.credit([replace(WEST.use, verdict="reject")], True, episode="e1")
    assert rewards(await samples_by_id(manager, 1, 5)) == {"run/0/0/0#0@1": 0.0}
    assert await unit_counters(manager, WEST.use) == (0, 0.0)
    await manager.rollback(before)
    assert await manager.take_batch(1, 5) is None
    await manager.aclose()


async def test_an_experience_rejected_and_later_found_by_a_question_guided(
    tmp_path,
):
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    found = replace(WEST.use, how="ask_unrefined")
    await manager.credit([found, replace(WEST.use, verdict="reject")], False, episode="e1")
    assert rewards(await samples_by_id(manager, 1, 5)) == {"run/0/0/0#0@1": -1.0}
    assert await unit_counters(manager, WEST.use) == (1, -1.0)
    await manager.aclose()


# ── marking as trained ────────────────────────────────────────────────────────────────────────────


async def test_an_unmarked_batch_is_returned_again_after_reopening(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path)
    await win(manager, WEST.use, "1")
    await lose(manager, EAST.use, "2")
    batch = await samples_by_id(manager, 2, 1)
    assert await samples_by_id(manager, 2, 1) == batch
    await manager.aclose()
    reopened = await open_bank(tmp_path)
    with pytest.raises(ValueError, match="not in the last batch"):
        await reopened.mark_trained(list(batch), 1)
    assert await samples_by_id(reopened, 2, 1) == batch
    await reopened.mark_trained(list(batch), 1)
    assert await generation_counters(reopened, "run/0/0/0") == (1, 1)
    with pytest.raises(ValueError, match="at least one unit, not 0"):
        await reopened.take_batch(0, 1)
    await reopened.aclose()


async def test_a_reward_is_trained_on_once(tmp_path):
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0)
    await win(manager, WEST.use, "1", "2")
    batch = list(await samples_by_id(manager, 1, 1))
    await win(manager, WEST.use, "3")
    marking = asyncio.create_task(manager.mark_trained([*batch, *batch], 1))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="not in the last batch"):
        await manager.mark_trained(batch, 1)
    marking.cancel()
    await asyncio.gather(marking, return_exceptions=True)
    with pytest.raises(ValueError, match="not in the last batch"):
        await manager.mark_trained(batch, 1)
    (ready,) = await manager._store.ready_units()
    assert (ready.pending.count, ready.pending.total, ready.c_train) == (1, 1.0, 1)
    await manager.aclose()
