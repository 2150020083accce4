"""Small houses for the tiny models.

The tests cover lessons, digests of episodes, houses without TextWorld, and training examples that
are made from the houses.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from crl.config.load import load
from crl.envs.alfworld import SMALL, SMALL_SPEC, small
from crl.envs.alfworld.house import Chore, read_chore
from crl.envs.alfworld.lessons import (
    LESSONS,
    HouseAdvisor,
    digest,
    lesson,
    read,
    receptacle_names,
    true_receptacles,
)
from crl.envs.alfworld.tasks import demonstration_tasks, probe_tasks
from crl.envs.base import StreamSettings, play_episode
from crl.envs.curriculum import LessonVerdict
from crl.envs.places import PROBE_LAYOUTS
from crl.manager.distillation.ops import parse_ops
from crl.tiny.drills.alfworld import answer, random_bank_lesson, refinement
from crl.tiny.drills.alfworld.chores import (
    ACTOR_CHORES,
    ASKING_CHORES,
    EXTRACTOR_CHORES,
    PERSONAS,
    TURNS,
    Chores,
)
from crl.tiny.drills.alfworld.houses import SmallHouse
from crl.tiny.drills.alfworld.personas import SearchingPlayer
from crl.tiny.drills.drill import Episode, as_hit
from crl.types import Segment, Task
from support.shipped_tasks import scripted_player

MUG = Chore("pick_and_place_simple", "mug", "shelf")
ADVISOR = HouseAdvisor()


def conversation(*texts: str, goal: str = "the jade attic: put a mug in shelf.") -> list[Segment]:
    """Return a goal, followed by texts of the house and the agent in turn. The house is first."""
    turns = [
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    ]
    return [Segment("user", goal, "task"), *turns]


SEARCH = conversation(
    "see cabinet 1, desk 1, shelf 1", "go to shelf 1", "shelf 1: nothing", "go to cabinet 1",
    "cabinet 1 closed", "look", "at cabinet 1", "go to desk 1", "desk 1: mug 1, pen 2",
    "take mug 1", "took mug 1", "go to cabinet 1", "cabinet 1 closed",
)  # fmt: skip


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", LESSONS)
def test_a_lesson_is_read_back(kind: str) -> None:
    thing = "plate" if kind == "aside" else "mug"
    assert read(lesson(kind, thing, "cabinet 2"), MUG) == (
        kind,
        "cabinet 2" if "{place}" in LESSONS[kind] else "",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mug is in cabinet.",
        "Mug is in cabinet 2.",
        "mug is in cabinet 2",
        "be careful.\n",
        "go to cabinet 2.",
    ],
)
def test_texts_that_are_not_lessons(text: str) -> None:
    assert read(text, MUG) == ("other", "")


def test_the_digest_of_an_episode() -> None:
    assert digest(SEARCH) == "mug in desk 1\npen in desk 1\nlooked in shelf 1, desk 1"
    assert digest(SEARCH[:6]) == "mug not seen\nnothing else\nlooked in shelf 1"
    assert digest(SEARCH[:2]) == "mug not seen\nnothing else\nlooked in nothing"


def test_the_first_sighting_of_a_thing_counts() -> None:
    """Check that the first place where an object was seen counts.

    An agent that puts the object elsewhere has moved it for this episode only.
    """
    moved = [
        *SEARCH[:10],
        *conversation(
            "took mug 1",
            "go to shelf 1",
            "shelf 1: nothing",
            "move mug 1 to shelf 1",
            "mug 1 in shelf 1",
        )[1:],
    ]
    again = [*moved, *conversation("", "go to shelf 1", "shelf 1: mug 1")[2:]]
    assert digest(again).startswith("mug in desk 1\n")


def test_the_advice_holds_in_every_visit() -> None:
    for i, task in enumerate(probe_tasks(60)):
        wanted = read_chore(task.goal).thing
        right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, random.Random(i))
        assert SMALL_SPEC.tasks.revisit
        visited = SMALL_SPEC.tasks.revisit(task, 3)
        house = SmallHouse()
        house.reset(visited)
        true_places = {
            place for name, place in house.locations.items() if name.startswith(f"{wanted} ")
        }
        assert right.removeprefix(f"{wanted} is in ").removesuffix(".") in true_places
        assert (
            wrong.removeprefix(f"{wanted} is in ").removesuffix(".")
            in {*receptacle_names(task)} - true_places
        )
        assert ADVISOR.judge(visited, right) == LessonVerdict("where", correct=True)
        assert ADVISOR.judge(visited, wrong) == LessonVerdict("wrong where", correct=False)
        assert ADVISOR.judge(visited, "be careful.") == LessonVerdict("careful", correct=False)
        assert int(task.params["lgen"]) in PROBE_LAYOUTS
    assert ADVISOR.informative(SEARCH)
    assert not ADVISOR.informative(SEARCH[:8])


# ── houses without TextWorld ──────────────────────────────────────────────────────────────────────


def check_same_texts(houses: int, turns: int) -> None:
    """Check that the engine and the house give the same texts for the same commands.

    Commands that no demonstrator gives are left out.
    """
    pytest.importorskip("alfworld")
    from crl.envs.alfworld.game import AlfworldGame

    engine, house, rng = AlfworldGame("compact"), SmallHouse(), random.Random(0)
    for task in demonstration_tasks(houses):
        assert engine.reset(task) == house.reset(task)
        for _ in range(turns):
            moves = {
                f"move {thing} to {place}"
                for thing in house.locations
                for place in receptacle_names(task)
                if holds(place, thing)
            }
            commands = [
                c
                for c in engine.admissible
                if not c.startswith(("examine", "slice", "move")) or c in moves
            ]
            assert commands == [c for c in house.admissible if not c.startswith("examine")]
            useful = [c for c in commands if not c.startswith(("go to", "look", "inventory"))]
            command = rng.choice(
                rng.choice([useful or commands, commands, [*commands, "go to the moon 1", "take"]])
            )
            expected, simulated = engine.step(command), house.step(command)
            assert (expected.text, expected.done, expected.success, expected.valid) == (
                simulated.text,
                simulated.done,
                simulated.success,
                simulated.valid,
            )
            if expected.done:
                break
    engine.close()


def holds(place: str, thing: str) -> bool:
    kinds = {kind.lower(): things.lower().split() for kind, things in small.HOLDS.items()}
    return thing.split()[0] in kinds[place.split()[0]]


def test_simulated_houses_give_the_texts_of_textworld(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    check_same_texts(12, 40)


@pytest.mark.soak
def test_many_simulated_houses_give_the_texts_of_textworld(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    check_same_texts(300, 60)


def test_the_compact_turn_limit_suffices_for_a_search_but_not_for_random_play() -> None:
    """Check that the turns suffice for a player but not for random commands.

    The scripted player wins in at least 95 % of the houses, random commands in at most 10 %.
    """
    tasks, house, rng = (
        SMALL_SPEC.tasks.eval_tasks("unseen", 128, 0, StreamSettings()),
        SmallHouse(),
        random.Random(0),
    )
    assert load(["alfworld"]).tasks["alfworld"].max_turns == TURNS
    scripted = [
        play_episode(house, task, scripted_player(SMALL_SPEC, random.Random(i)), TURNS).success
        for i, task in enumerate(tasks)
    ]
    assert sum(scripted) >= 0.95 * len(tasks)
    wins = 0
    for task in tasks:
        house.reset(task)
        wins += any(house.step(rng.choice(house.admissible)).success for _ in range(TURNS))
    assert wins <= 0.1 * len(tasks)


# ── the actor ─────────────────────────────────────────────────────────────────────────────────────


def commands(segments: Sequence[Segment]) -> list[str]:
    return [segment.text for segment in segments if segment.origin == "policy"]


def episodes_with_advice(
    advice: str, tasks: Sequence[Task], chores: Chores = ACTOR_CHORES
) -> list[Episode]:
    return list(
        replace(chores, advice=((advice, 1.0),), slip=0.0).episodes(random.Random(1), tasks)
    )


@pytest.mark.parametrize("chores", [ACTOR_CHORES, ASKING_CHORES])
def test_demonstrations_are_episodes_of_the_game(chores: Chores) -> None:
    """Check that the commands give the same texts again and that all of them are valid."""
    house = SmallHouse()
    for episode in chores.episodes(random.Random(0), demonstration_tasks(100)):
        observations = [segment.text for segment in episode.segments if segment.origin == "env"]
        assert observations[0] == house.reset(episode.task)
        results = [house.step(command) for command in commands(episode.segments)]
        assert [result.text for result in results] == observations[1:]
        assert all(result.valid for result in results)
        assert (
            [result.success for result in results].index(True) == len(results) - 1
            if episode.success
            else len(results) == TURNS
        )


def test_right_advice_helps_and_wrong_advice_does_not() -> None:
    tasks = demonstration_tasks(300)
    success = {
        advice: sum(episode.success for episode in episodes_with_advice(advice, tasks)) / 300
        for advice in ("none", "right", "random")
    }
    assert 0.4 <= success["none"] <= 0.6
    assert success["right"] >= success["none"] + 0.2
    assert success["random"] <= success["right"] - 0.15


def test_an_agent_goes_directly_to_the_advised_place() -> None:
    searching = replace(ACTOR_CHORES, personas=((SearchingPlayer, 1.0),))
    for advice in ("right", "random"):
        for episode in episodes_with_advice(advice, demonstration_tasks(60), searching):
            assert episode.hint
            place = read(episode.hint.text, read_chore(episode.task.goal))[1]
            assert commands(episode.segments)[0] == f"go to {place}"


def test_success_rates_of_personas() -> None:
    tasks = demonstration_tasks(150)
    for persona, _ in PERSONAS:
        alone = Chores(((persona, 1.0),))
        rate = sum(episode.success for episode in alone.episodes(random.Random(0), tasks)) / len(
            tasks
        )
        assert rate >= 0.85 if persona is SearchingPlayer else 0.2 <= rate <= 0.95


def test_agents_ask_at_most_once_early_and_not_for_things_that_they_have_seen() -> None:
    asked = 0
    for episode in ASKING_CHORES.episodes(random.Random(0), demonstration_tasks(200)):
        indices = [
            number
            for number, segment in enumerate(episode.segments)
            if segment.origin == "tool_call"
        ]
        asked += len(indices)
        if indices:
            assert len(commands(episode.segments[: indices[0]])) <= 2
            assert not ADVISOR.informative(episode.segments[: indices[0]])
            reply, action = episode.segments[indices[0] + 1 : indices[0] + 3]
            assert reply.origin == "tool_result"
            if reply.text.startswith("go to "):
                assert action.text in (
                    reply.text.removesuffix("."),
                    "look",
                    "inventory",
                ) or action.text.startswith(("open ", "go to "))
    assert asked >= 50


# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


def test_lessons_are_true_of_their_episodes() -> None:
    kinds = Counter[str]()
    for number, episode in enumerate(
        EXTRACTOR_CHORES.episodes(random.Random(2), demonstration_tasks(400))
    ):
        kind = list(LESSONS)[number % len(LESSONS)]
        parsed = parse_ops(answer(kind, episode), 1 if episode.hint else 0)
        (op,), chore = parsed.ops, read_chore(episode.task.goal)
        kinds[op.kind] += 1
        seen = digest(episode.segments)
        if kind in ("where", "aside"):
            assert (not op.text) == (("not seen" if kind == "where" else "nothing else") in seen)
        if not op.text:
            continue
        assert read(op.text, chore)[0] == kind
        if kind in ("where", "aside"):
            assert op.text.replace(" is in ", " in ").removesuffix(".") in seen.splitlines()
        if kind == "where":
            assert ADVISOR.judge(episode.task, op.text).correct
        if op.kind == "update":
            assert episode.hint
            assert read(episode.hint.text, chore)[0] == "where"
            assert episode.hint.text != op.text
    assert min(kinds["add"], kinds["return"]) >= 10
    assert kinds["update"] >= 1


def test_a_false_hint_is_corrected() -> None:
    (task,) = demonstration_tasks(1)
    wrong = Episode(task, as_hit("mug is in shelf 1.", task), tuple(SEARCH), success=False)
    assert answer("where", wrong) == '[{"op":"update","target":1,"text":"mug is in desk 1."}]'
    assert (
        answer("where", replace(wrong, hint=as_hit("pen is in shelf 1.", task)))
        == '[{"op":"add","text":"mug is in desk 1."}]'
    )
    assert answer("where", replace(wrong, segments=tuple(SEARCH[:6]))) == '[{"op":"return"}]'
    assert answer("first", wrong) == '[{"op":"add","text":"look in shelf 1 first."}]'


@pytest.mark.parametrize(
    ("length", "text", "expected"),
    [
        (2, "mug is in desk 1.", '[{"op":"refine","text":"go to desk 1."}]'),
        (2, "pen is in desk 1.", '[{"op":"return"}]'),
        (4, "mug is in shelf 1.", '[{"op":"return"}]'),  # the agent has looked there
        (10, "mug is in cabinet 1.", '[{"op":"return"}]'),  # the agent has seen a mug
    ],
)
def test_a_lesson_is_adapted_to_the_agents_position(length: int, text: str, expected: str) -> None:
    assert refinement(SEARCH[:length], text) == expected


def test_most_lessons_of_a_place_are_about_its_thing() -> None:
    (task,) = demonstration_tasks(1)
    rng = random.Random(0)
    is_where = [
        read(random_bank_lesson(task, rng), read_chore(task.goal))[0] == "where" for _ in range(300)
    ]
    assert 0.5 <= sum(is_where) / 300 <= 0.8
    assert {*true_receptacles(task)} < {*receptacle_names(task)}
    assert task.name == SMALL
