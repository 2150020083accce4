"""Credit and the extractor's training data through a real bank, corner by corner, on numbers worked by hand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from credited import ANSWERS, BETTER, E0, ENDS, GOES_EAST, GOES_WEST, KEPT, W0, distil, lose, opened, taken, train, west_and_east, win
from doors import renderer
from extractors import Scribe, hit, logged, request, search

from crl.manager import ExperienceManager, ExtractorSample, GroupSuccess, UnitKey
from crl.manager.reading import reading
from crl.manager.store import Store
from crl.types import ExperienceUse, Lift, TokenTrace, TrackRecord


async def merged(made: ExperienceManager, *ops: dict[str, Any]) -> str:
    """The bank after a merge with this answer; the uid of what it made."""
    assert isinstance(made._engine, Scribe)
    made._engine.merging = json.dumps(ops)
    before = set(made._bank.entries)
    stats = await made.merge()
    assert stats is not None
    assert stats.failed == 0
    return next(iter(set(made._bank.entries) - before), "")


def rewards(batch: dict[str, ExtractorSample]) -> dict[str, float]:
    """Of the ops, without what came before them."""
    return {name: sample.reward for name, sample in batch.items() if not name.endswith("@head")}


def advantages(batch: dict[str, ExtractorSample]) -> Any:
    return pytest.approx({name: sample.advantage for name, sample in batch.items()})


def text(trace: TokenTrace) -> str:
    """What it is trained on."""
    return renderer().decode([token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask])


async def counters(made: ExperienceManager, generation: str) -> tuple[int, int | None] | None:
    """(c_train, t_last); None when it is not kept."""
    found = await made._store.generations([generation])
    return (found[generation].c_train, found[generation].t_last) if found else None


async def ever(made: ExperienceManager, use: ExperienceUse) -> tuple[int, float]:
    """(credited, credit) of a version, whatever has become of it."""
    sql = "SELECT credited, credit FROM units WHERE uid = ? AND version = ?"
    ((credited, credit),) = await made._store._database.rows(sql, (use.uid, use.version))
    return credited, credit


# ── old generations ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_old_generation_is_trained_as_it_was_sampled_however_old(tmp_path):
    engine = Scribe(ANSWERS, version=3)
    made = await west_and_east(tmp_path, engine=engine)
    await made.aclose()
    engine.version = 40
    again = await opened(tmp_path, engine)
    again.advance(500)
    await again.drain()
    payloads = await again._store._database.rows("SELECT payload FROM requests")
    assert [row["payload"] for row in payloads] == [None, None]
    await win(again, W0.use, "run/500/0/0")
    batch = await taken(again, 1, 500)
    trace = batch["run/0/0/0#0@1"].trace
    sampled = [i for i, mask in enumerate(trace.mask) if mask]
    assert {trace.logprobs[i] for i in sampled} == {-4.0}, "−1 − 3: of then, not of version 40"
    assert {trace.versions[i] for i in sampled} == {3}
    assert text(trace) == GOES_WEST + ENDS
    (generation,) = (await again._store.generations(["run/0/0/0"])).values()
    assert generation.extractor == 3
    await again.aclose()


async def supersede(made: ExperienceManager) -> None:
    await distil(made, request(10, note="better", shown=(W0,)))


async def evict(made: ExperienceManager) -> None:
    await distil(made, request(10, note="north"))  # over the cap of two the oldest goes


async def discard(made: ExperienceManager) -> None:
    await merged(made, {"op": "discard", "target": 1})


async def merge_away(made: ExperienceManager) -> None:
    await merged(made, {"op": "merge", "targets": [1, 2], "text": "Go west, then east."})


@pytest.mark.parametrize("go", [supersede, evict, discard, merge_away])
@pytest.mark.parametrize(("late", "trained"), [(KEPT, True), (KEPT + 1, False)])
async def test_what_guides_nobody_any_more_earns_for_as_long_as_episodes_may_run(tmp_path, go, late, trained):
    made = await west_and_east(tmp_path, cap=2)
    made.advance(10)
    for group in range(9):  # until each has guided
        await made.search([search(group=group)])
    await go(made)
    assert (W0.use.uid, 1) not in {(uid, entry.version) for uid, entry in made._bank.entries.items()}
    made.advance(10 + late)
    await made.drain()
    await win(made, W0.use, "run/10/0/0")
    assert rewards(await taken(made, 1, 10 + late)) == ({"run/0/0/0#0@1": 1.0} if trained else {})
    assert await ever(made, W0.use) == (1, 1.0), "counted for the version in either case"
    await made.aclose()


async def test_what_is_pending_is_trained_however_late_and_only_then_forgotten(tmp_path):
    made = await west_and_east(tmp_path)
    await lose(made, W0.use, "run/1/0/0")
    await distil(made, request(1, note="better", shown=(W0,)))
    made.advance(1000)
    await made.drain()
    assert rewards(await train(made, 1, 1000)) == {"run/0/0/0#0@1": -1.0}
    assert await counters(made, "run/0/0/0") == (1, 1000)
    await made.drain()
    assert await counters(made, "run/0/0/0") is None
    await made.aclose()


# ── pooled units ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_each_training_takes_the_mean_of_the_episodes_since_the_one_before(tmp_path):
    made = await west_and_east(tmp_path, cooldown=0)
    await win(made, W0.use, "before 1", "before 2")
    await lose(made, W0.use, "before 3")
    batch = await taken(made, 1, 5)
    assert rewards(batch) == pytest.approx({"run/0/0/0#0@1": 1 / 3})  # (1 + 1 − 1) / 3
    await lose(made, W0.use, "while it is trained 1", "while it is trained 2")
    assert batch["run/0/0/0#0@1"].reward == pytest.approx(1 / 3)
    await win(made, E0.use, "another's")
    await made.mark_trained(list(batch), 5)
    await win(made, W0.use, "after")
    # Ready anew with the mark, and so behind the other one: (−1 − 1 + 1) / 3
    assert list(rewards(await taken(made, 2, 5)).items()) == [("run/0/1/0#0@1", 1.0), ("run/0/0/0#0@1", pytest.approx(-1 / 3))]
    await train(made, 2, 5)
    assert await made.take_batch(1, 99) is None, "each episode once"
    assert await ever(made, W0.use) == (6, 0.0)
    await made.aclose()


async def test_an_episode_counts_once_however_often_it_is_told_and_however_often_the_same_guided_it(tmp_path):
    made = await west_and_east(tmp_path)
    await asyncio.gather(*(made.credit([W0.use], True, episode="run/1/0/0") for _ in range(3)))
    await made.credit([W0.use], False, episode="run/1/0/0")  # nor can it be told otherwise
    await made.credit([W0.use, E0.use, W0.use], False, episode="run/1/0/1")
    assert rewards(await taken(made, 2, 1)) == {"run/0/0/0#0@1": 0.0, "run/0/1/0#0@1": -1.0}  # (1 − 1) / 2
    assert (await ever(made, W0.use), await ever(made, E0.use)) == ((2, 0.0), (1, -1.0))
    entry = made._bank.entries[W0.use.uid]
    assert (entry.credited, entry.credit) == (2, 0.0)
    await made.aclose()


# ── cooldown ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("credit", "weights"),
    [
        ({"cooldown": 2, "alpha": 0.5}, [(4, 1.0), (5, None), (6, 2**-0.5), (7, None), (8, 3**-0.5)]),
        ({"cooldown": 0, "alpha": 0.5}, [(4, 1.0), (4, 2**-0.5), (4, 3**-0.5), (9, 0.5)]),  # 4^−½
        ({"cooldown": 3, "alpha": 1.0}, [(0, 1.0), (1, None), (2, None), (3, 0.5), (5, None), (9, 1 / 3)]),
        ({"cooldown": 1, "alpha": 0.0}, [(7, 1.0), (7, None), (8, 1.0)]),
        ({"cooldown": 2, "alpha": 2.0}, [(1, 1.0), (3, 0.25), (5, 1 / 9)]),
    ],
)
async def test_the_weight_at_each_step(tmp_path, credit, weights):
    """(step, w), None = it waits. One episode is won before each."""
    made = await west_and_east(tmp_path, **credit)
    waiting, trainings, last = 0, 0, None
    for number, (step, weight) in enumerate(weights):
        await win(made, W0.use, f"won {number}")
        waiting += 1
        batch = await train(made, 1, step)
        assert bool(batch) == (weight is not None)
        if batch:
            trainings, last = trainings + 1, step
            assert [sample.weight for sample in batch.values()] == pytest.approx([weight, weight]), "the op, and what came before it"
            sql = "SELECT data ->> 'count' FROM log WHERE kind = 'train' AND data != '{}' ORDER BY seq DESC LIMIT 1"
            assert (await made._store._database.rows(sql))[0][0] == waiting, "what waited is trained with the rest"
            waiting = 0
        assert await counters(made, "run/0/0/0") == (trainings, last), "what waits moves no counter"
    await made.aclose()


async def test_the_cooldown_is_the_generations_and_what_waits_fills_no_batch(tmp_path):
    made = await opened(tmp_path, cooldown=2)
    await distil(made, request(note="two"), request(group=1, note="north"))
    first, second, other = hit("run/0/0/0#0").use, hit("run/0/0/0#1").use, hit("run/0/1/0#0").use
    await win(made, first, "1")
    await train(made, 1, 4)
    await lose(made, second, "2")  # another op of the same generation: it waits too
    await win(made, other, "3")
    assert await made.take_batch(2, 5) is None
    assert rewards(await taken(made, 1, 5)) == {"run/0/1/0#0@1": 1.0}
    batch = await taken(made, 2, 6)
    assert rewards(batch) == {"run/0/0/0#1@1": -1.0, "run/0/1/0#0@1": 1.0}, "it has become ready first"
    # w = 2^−½ and 1; baseline = (1 − 2^−½) / (1 + 2^−½) = 0.17157; A = 2^−½ · (−1.17157) and 0.82843
    assert advantages(batch) == {
        "run/0/0/0#1@1": -0.828427,
        "run/0/0/0@head": -0.828427,
        "run/0/1/0#0@1": 0.828427,
        "run/0/1/0@head": 0.828427,
    }
    await made.aclose()


# ── several ops of one generation ───────────────────────────────────────────────────────────────────────────────────


def sampled_at(sample: ExtractorSample) -> set[int]:
    return {i for i, mask in enumerate(sample.trace.mask) if mask}


async def test_the_ops_of_an_answer_are_trained_each_on_its_own_tokens(tmp_path):
    made = await opened(tmp_path)
    await distil(made, request(note="two"))
    await win(made, hit("run/0/0/0#0").use, "1", "2", "3")
    await lose(made, hit("run/0/0/0#0").use, "4")
    await lose(made, hit("run/0/0/0#1").use, "5")
    batch = await train(made, 2, 1)
    # r̄ = (3 − 1) / 4 and −1; the head has their mean, and so the baseline: (0.5 − 1) / 2
    assert {name: (s.reward, s.advantage) for name, s in batch.items()} == {
        "run/0/0/0#0@1": (0.5, 0.75), "run/0/0/0#1@1": (-1.0, -0.75), "run/0/0/0@head": (-0.25, 0.0)
    }  # fmt: skip
    first, second, head = batch.values()
    assert (text(head.trace), text(first.trace)) == ("It went west, then east.</think>\n[", GOES_WEST)
    assert text(second.trace).endswith(GOES_EAST[1:] + ENDS)
    places = [sampled_at(sample) for sample in (head, first, second)]
    assert len(set.union(*places)) == sum(map(len, places)), "no token is trained twice"
    assert max(places[0]) + 1 == min(places[1])
    assert await counters(made, "run/0/0/0") == (1, 1), "one training, whatever number of samples"
    await made.aclose()


async def test_an_op_that_was_not_credited_has_no_part_in_the_batch(tmp_path):
    made = await opened(tmp_path)
    await distil(made, request(note="two"), request(group=1, note="north"))
    await win(made, hit("run/0/0/0#1").use, "1")
    await lose(made, hit("run/0/1/0#0").use, "2")
    batch = await taken(made, 2, 1)
    assert advantages(batch) == {"run/0/0/0#1@1": 1.0, "run/0/1/0#0@1": -1.0, "run/0/0/0@head": 1.0, "run/0/1/0@head": -1.0}
    assert GOES_WEST in renderer().decode(batch["run/0/0/0#1@1"].trace.ids), "it stands before, as context"
    assert GOES_WEST not in "".join(text(sample.trace) for sample in batch.values())
    await made.aclose()


async def test_an_update_and_an_add_of_one_answer_are_two_units_of_one_generation(tmp_path):
    made = await opened(tmp_path)
    await distil(made, request(note="west"))
    await distil(made, request(1, note="both", shown=(W0,)))
    await win(made, hit("run/0/0/0#0", 2).use, "1")
    await lose(made, hit("run/1/0/0#1").use, "2")
    batch = await train(made, 2, 3)
    assert {name: (s.generation, s.advantage) for name, s in batch.items()} == {
        "run/0/0/0#0@2": ("run/1/0/0", 1.0), "run/1/0/0#1@1": ("run/1/0/0", -1.0), "run/1/0/0@head": ("run/1/0/0", 0.0)
    }  # fmt: skip
    assert (text(batch["run/0/0/0#0@2"].trace), text(batch["run/1/0/0#1@1"].trace)) == (BETTER, GOES_EAST + ENDS)
    assert (await counters(made, "run/1/0/0"), await counters(made, "run/0/0/0")) == ((1, 3), None), "version 1 has nothing to earn"
    await made.aclose()


async def test_the_end_is_trained_with_the_last_op_alone(tmp_path):
    """What follows the last op closes the answer, unless something refused follows."""
    answers = {
        "fenced": f"```json\n[{GOES_WEST}]\n```\nI hope this helps!",
        "worse": f'[{GOES_WEST}, {{"op": "drop"}}]',
        "back": f'[{GOES_WEST}, {{"op": "return"}}]',
    }
    made = await opened(tmp_path, Scribe(answers))
    for group, note in enumerate(answers):
        await distil(made, request(group=group, note=note))
        await win(made, hit(f"run/0/{group}/0#0").use, note)
    batch = await taken(made, 3, 1)
    assert [text(batch[f"run/0/{group}/0#0@1"].trace).partition(GOES_WEST[-6:])[2] for group in range(3)] == [
        "]\n```\nI hope this helps!<|im_end|>", "", "",
    ]  # fmt: skip
    await made.aclose()


async def test_an_answer_that_was_cut_has_no_end_to_be_trained(tmp_path):
    answer = f"[{GOES_WEST}, and now I would like to add that"
    limit = len(renderer().encode(answer))
    made = await opened(tmp_path, Scribe({"long": answer}), max_tokens=limit)
    await distil(made, request(note="long"))
    await win(made, W0.use, "1")
    assert text((await taken(made, 1, 1))["run/0/0/0#0@1"].trace) == GOES_WEST
    await made.aclose()


async def test_a_return_earns_nothing_and_no_part_of_the_head(tmp_path):
    made = await opened(tmp_path, malformed_reward=-1.0)
    await distil(made, request(note="none"), request(group=1, note="after"))
    assert (await made.stats()).items() >= {"generations": 1, "buffer/ready": 0, "ops/return": 2}.items()
    await made.credit([hit("run/0/0/0#0").use], True, episode="stray")
    await win(made, hit("run/0/1/0#1").use, "1")
    batch = await taken(made, 1, 1)
    assert {name: text(sample.trace) for name, sample in batch.items()} == {"run/0/1/0#1@1": GOES_EAST + ENDS, "run/0/1/0@head": "["}
    await made.credit([], True, episode="free")
    assert (await made.stats()).items() >= {"ops/credit": 1, "ops/stray": 1, "buffer/ready": 1}.items()
    await made.aclose()


# ── updates, merges ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_guided_is_credited_in_the_version_that_guided(tmp_path):
    made = await opened(tmp_path)
    await distil(made, request(note="west"))
    (guide,) = await made.search([search()])
    assert guide is not None
    await win(made, guide.use, "run/1/0/0")
    await distil(made, request(1, note="better", shown=(guide,)))
    entry = made._bank.entries["run/0/0/0#0"]
    assert (entry.version, entry.retrieved, entry.last_returned_step, entry.credited, entry.credit) == (2, 0, None, 0, 0.0)
    await win(made, guide.use, "run/1/0/1", "run/1/0/2")  # these began before the update
    await lose(made, guide.use, "run/1/0/3")
    await lose(made, hit(entry.uid, 2).use, "run/2/0/0")
    batch = await taken(made, 2, 3)
    # r̄ = (3 − 1) / 4 and −1, baseline −0.25
    assert {name: (s.generation, s.reward) for name, s in batch.items() if "#" in name} == {
        "run/0/0/0#0@1": ("run/0/0/0", 0.5), "run/0/0/0#0@2": ("run/1/0/0", -1.0)
    }  # fmt: skip
    assert advantages(batch) == {"run/0/0/0#0@1": 0.75, "run/0/0/0#0@2": -0.75, "run/0/0/0@head": 0.75, "run/1/0/0@head": -0.75}
    assert (entry.credited, entry.credit) == (1, -1.0)
    await made.aclose()


async def test_a_merge_begins_at_zero_and_its_parents_keep_what_they_earned(tmp_path):
    made = await west_and_east(tmp_path)
    await win(made, W0.use, "1")
    await lose(made, E0.use, "2", "3")
    await win(made, E0.use, "4")
    uid = await merged(made, {"op": "merge", "targets": [1, 2], "text": "Go west, then east."})
    name = uid.partition("#")[0]
    entry = made._bank.entries[uid]
    assert (entry.credited, entry.credit, entry.retrieved) == (0, 0.0, 0)
    await lose(made, hit(uid).use, "5")
    made.advance(99)
    await made.drain()
    batch = await train(made, 3, 99)
    # r̄ = 1, −1/3 and −1: the baseline is −1/9
    assert {i: s for i, s in batch.items() if "#" in i}.keys() == {"run/0/0/0#0@1", "run/0/1/0#0@1", f"{uid}@1"}
    assert advantages(batch) == {
        "run/0/0/0#0@1": 10 / 9, "run/0/1/0#0@1": -2 / 9, f"{uid}@1": -8 / 9,
        "run/0/0/0@head": 10 / 9, "run/0/1/0@head": -2 / 9, f"{name}@head": -8 / 9,
    }  # fmt: skip
    assert text(batch[f"{uid}@1"].trace) == '{"op": "merge", "targets": [1, 2], "text": "Go west, then east."}' + ENDS
    await made.drain()
    assert [await counters(made, g) for g in ("run/0/0/0", "run/0/1/0", name)] == [None, None, (1, 99)]
    await made.aclose()


async def test_what_is_discarded_is_trained_on_what_it_had_earned(tmp_path):
    made = await west_and_east(tmp_path)
    await lose(made, W0.use, "1")
    assert await merged(made, {"op": "discard", "target": 1}) == ""
    made.advance(99)
    await made.drain()
    assert rewards(await train(made, 1, 99)) == {"run/0/0/0#0@1": -1.0}
    assert (await made.stats())["buffer/ready"] == 0, "a discard earns nothing itself"
    await made.aclose()


# ── generations without an op ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("reward", "advantage"), [(-1.0, -1.5), (-0.2, -0.9), (0.0, -0.75)])
async def test_at_most_a_quarter_of_a_batch_is_without_an_op_at_the_reward_that_was_set(tmp_path, reward, advantage):
    made = await opened(tmp_path, malformed_reward=reward, cooldown=0)
    bad = [request(member=m, note="bad") for m in range(3)]
    await distil(made, *bad, *(request(group=1, member=m, note="north") for m in range(3)))
    assert (await made.stats()).items() >= {"ops/malformed": 3, "buffer/ready": 3}.items()
    for repeat in range(3):
        for member in range(3):
            await win(made, hit(f"run/0/1/{member}#0").use, f"{repeat} {member}")
        batch = await train(made, 4, 1)
        assert list(rewards(batch)) == [f"run/0/0/{repeat}@0", "run/0/1/0#0@1", "run/0/1/1#0@1", "run/0/1/2#0@1"]
        if repeat == 0:  # baseline (reward + 3) / 4
            assert batch["run/0/0/0@0"].advantage == pytest.approx(advantage)
        assert text(batch[f"run/0/0/{repeat}@0"].trace) == "H", "no answer that could be used begins like this"
    await made.drain()
    assert (await made.stats()).items() >= {"generations": 3, "buffer/ready": 0}.items(), "once trained they can earn no more"
    await made.aclose()


@pytest.mark.parametrize(
    ("answer", "cut", "blamed"),
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
async def test_of_an_answer_without_an_op_the_token_is_trained_that_no_usable_one_has_there(tmp_path, answer, cut, blamed):
    """Usable answers share what comes before it, and what follows may read like one.

    An answer that is cut by the token limit is wrong in its last token, in the place of its end.
    """
    limit = {"max_tokens": len(renderer().encode(answer))} if cut else {}
    made = await opened(tmp_path, Scribe({"odd": answer}), malformed_reward=-1.0, **limit)
    await distil(made, request(note="odd"))
    (unit,) = await made._store.ready()
    (generation,) = (await made._store.generations(["run/0/0/0"])).values()
    start, stop = unit.pending.span
    assert stop == start + 1
    said = [renderer().decode([token]) for token in generation.completion.ids]
    assert said[start].startswith(blamed)
    assert "".join(said[:start]) + blamed == (answer + "<|im_end|>")[: len("".join(said[:start]) + blamed)]
    await made.aclose()


async def test_of_answers_without_an_op_as_many_wait_as_a_batch_holds(tmp_path):
    made = await opened(tmp_path, malformed_reward=-1.0, cooldown=0)
    await distil(made, *(request(member=m, note="bad") for m in range(6)), *(request(group=1, member=m, note="north") for m in range(3)))
    assert await made.take_batch(4, 1) is None
    figures = await made.stats()
    assert figures.items() >= {"buffer/ready": 4, "ops/malformed": 6, "dropped/too many malformed": 2}.items()
    assert await made.take_batch(4, 1) is None
    assert (await made.stats())["dropped/too many malformed"] == 2, "those that are left fit"
    await made.drain()
    assert (await made.stats())["generations"] == 4 + 3, "what was dropped is not kept"
    for member in range(3):
        await win(made, hit(f"run/0/1/{member}#0").use, f"{member}")
    assert "run/0/0/2@0" in await train(made, 4, 1), "of the last four the first"
    await made.aclose()


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_verdicts_change_what_is_trained_on_and_not_the_record_of_what_helped(tmp_path):
    """W0: accepted and won 2, accepted and lost 0, rejected 0, unjudged and lost −1: mean 1/4. E0: refined and lost −1/2. Of W0's four
    episodes it guided three, of which one was won."""
    made = await west_and_east(tmp_path, cooldown=0)
    accepted, rejected = replace(W0.use, verdict="accept"), replace(W0.use, verdict="reject")
    given = [(accepted, True), (accepted, False), (rejected, True), (W0.use, False), (replace(E0.use, verdict="refine"), False)]
    for _ in range(2):  # a repeat changes nothing
        for episode, (use, success) in enumerate(given):
            await made.credit([use], success, episode=f"e{episode}")
    assert rewards(await taken(made, 2, 5)) == {"run/0/0/0#0@1": 0.25, "run/0/1/0#0@1": -0.5}
    assert (await ever(made, W0.use), await ever(made, E0.use)) == ((3, -1.0), (1, -1.0))
    assert {uid: (entry.credited, entry.credit) for uid, entry in made._bank.entries.items()} == {
        W0.use.uid: (3, -1.0),
        E0.use.uid: (1, -1.0),
    }
    await made.aclose()
    with reading(tmp_path / "bank.sqlite") as bank:
        assert [use.reward for use in bank.uses(W0.use.uid)] == [1.0, -1.0, -1.0]


async def test_what_was_expected_without_it_is_taken_off_what_it_is_trained_on_alone(tmp_path):
    """Of W0 two episodes, won where half the others of the group were, and lost where none was: (1 − 0 − 1 + 1) / 2; accepted by a critic
    2 − 0.5; a reject takes no part in what the episode came to."""
    made = await west_and_east(tmp_path, cooldown=0)
    await made.credit([W0.use], True, episode="a", expected=0.0)
    await made.credit([W0.use], False, episode="b", expected=-1.0)
    await made.credit([replace(E0.use, verdict="accept")], True, episode="c", expected=0.5)
    await made.credit([replace(E0.use, verdict="reject")], True, episode="d", expected=0.5)
    assert rewards(await taken(made, 2, 5)) == {"run/0/0/0#0@1": 0.5, "run/0/1/0#0@1": 0.75}
    assert (await ever(made, W0.use), await ever(made, E0.use)) == ((2, 0.0), (1, 1.0))
    await made.aclose()


async def test_a_group_adds_to_a_lift_once_and_what_is_unknown_to_none(tmp_path):
    """1/2 and −1/4: mean 1/8, m2 = 2 · (3/8)². The lift is neither trained on nor is it credit."""
    made = await west_and_east(tmp_path, cooldown=0)
    west = UnitKey.earning(W0.use)
    stranger = GroupSuccess(UnitKey("nobody", 1), 1.0, 0.0)
    first, second = GroupSuccess(west, 1.0, 0.5), GroupSuccess(west, 0.25, 0.5)
    await asyncio.gather(*(made.record_lifts({"run/1/0": [stranger, first]}) for _ in range(3)))
    await made.record_lifts({"run/1/0": [stranger, GroupSuccess(west, 0.0, 1.0)], "run/1/1": [second]})  # nor can it be told otherwise
    await made.record_lifts({})
    assert made._bank.entries[west.uid].lift == Lift(2, 0.125, 2 * 0.375**2)
    assert made._bank.entries[west.uid].record == TrackRecord(0, 0, 0.125)
    assert [origin for origin, _ in logged(tmp_path / "bank.sqlite", "lift")] == ["run/1/0", "run/1/1"]
    assert await made.take_batch(1, 5) is None
    assert await ever(made, W0.use) == (0, 0.0)
    await made.aclose()


async def test_a_lift_is_of_one_version_and_goes_back_with_the_bank(tmp_path):
    made = await west_and_east(tmp_path, cooldown=0)
    await made.record_lifts({"run/1/0": [GroupSuccess(UnitKey(W0.use.uid, 1), 1.0, 0.0)]})
    before = await made.snapshot()
    await made.record_lifts({"run/1/1": [GroupSuccess(UnitKey(W0.use.uid, 1), 0.0, 1.0)]})
    await supersede(made)
    await made.record_lifts({"run/11/0": [GroupSuccess(UnitKey(W0.use.uid, 1), 0.0, 1.0), GroupSuccess(UnitKey(W0.use.uid, 2), 0.5, 0.0)]})
    assert made._bank.entries[W0.use.uid].lift == Lift(1, 0.5)
    await made.rollback(before)
    assert made._bank.entries[W0.use.uid].lift == Lift(1, 1.0)
    await made.record_lifts({"run/1/1": [GroupSuccess(UnitKey(W0.use.uid, 1), 1.0, 1.0)]})  # which has not happened
    await made.export_copy(tmp_path / "copy.sqlite")
    await made.aclose()
    for path in (tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"):
        store = await Store.open(path)
        entries = {entry.uid: entry.lift for entry, _ in await store.entries()}
        assert entries == {W0.use.uid: Lift(2, 0.5, 0.5), E0.use.uid: None}
        await store.aclose()


async def test_what_nothing_was_expected_of_is_recorded_and_not_trained_on(tmp_path):
    """None: nobody is known to have played without. A reject earns r̃ = 0, whatever was expected."""
    made = await west_and_east(tmp_path, cooldown=0)
    await made.credit([W0.use], True, episode="a", expected=None)
    assert await made._store.ready() == []
    await made.credit([W0.use], True, episode="b", expected=0.5)
    await made.credit([replace(E0.use, verdict="reject")], True, episode="c", expected=None)
    assert rewards(await taken(made, 2, 5)) == {"run/0/0/0#0@1": 0.5, "run/0/1/0#0@1": 0.0}
    assert (await ever(made, W0.use), await ever(made, E0.use)) == ((2, 2.0), (0, 0.0))
    await made.aclose()


async def test_what_was_only_rejected_is_trained_on_and_has_no_record(tmp_path):
    made = await west_and_east(tmp_path, cooldown=0)
    before = await made.snapshot()
    await made.credit([replace(W0.use, verdict="reject")], True, episode="e1")
    assert rewards(await taken(made, 1, 5)) == {"run/0/0/0#0@1": 0.0}
    assert await ever(made, W0.use) == (0, 0.0)
    await made.rollback(before)
    assert await made.take_batch(1, 5) is None
    await made.aclose()


async def test_an_experience_that_was_rejected_and_then_found_by_a_question_guided_the_episode(tmp_path):
    made = await west_and_east(tmp_path, cooldown=0)
    found = replace(W0.use, how="ask_unrefined")
    await made.credit([found, replace(W0.use, verdict="reject")], False, episode="e1")
    assert rewards(await taken(made, 1, 5)) == {"run/0/0/0#0@1": -1.0}
    assert await ever(made, W0.use) == (1, -1.0)
    await made.aclose()


# ── what is marked ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_whose_training_was_cut_short_is_offered_again_after_reopening(tmp_path):
    made = await west_and_east(tmp_path)
    await win(made, W0.use, "1")
    await lose(made, E0.use, "2")
    batch = await taken(made, 2, 1)
    assert await taken(made, 2, 1) == batch
    await made.aclose()
    again = await opened(tmp_path)
    with pytest.raises(ValueError, match="the last batch holds no"):
        await again.mark_trained(list(batch), 1)
    assert await taken(again, 2, 1) == batch
    await again.mark_trained(list(batch), 1)
    assert await counters(again, "run/0/0/0") == (1, 1)
    with pytest.raises(ValueError, match="at least one unit, not 0"):
        await again.take_batch(0, 1)
    await again.aclose()


async def test_a_reward_is_spent_once_whoever_marks_it(tmp_path):
    made = await west_and_east(tmp_path, cooldown=0)
    await win(made, W0.use, "1", "2")
    batch = list(await taken(made, 1, 1))
    await win(made, W0.use, "3")
    marking = asyncio.create_task(made.mark_trained([*batch, *batch], 1))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="the last batch holds no"):
        await made.mark_trained(batch, 1)
    marking.cancel()
    await asyncio.gather(marking, return_exceptions=True)
    with pytest.raises(ValueError, match="the last batch holds no"):
        await made.mark_trained(batch, 1)
    (ready,) = await made._store.ready()
    assert (ready.pending.count, ready.pending.total, ready.c_train) == (1, 1.0, 1)
    await made.aclose()
