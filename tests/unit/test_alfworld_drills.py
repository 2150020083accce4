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
from crl.envs.alfworld import SMALL, SMALL_SPEC, demonstration_tasks, probe_tasks, small
from crl.envs.alfworld.house import Chore, read_chore
from crl.envs.alfworld.lessons import (
    LESSONS,
    HouseAdvisor,
    digest,
    lesson,
    places,
    read,
    true_places,
)
from crl.envs.base import LessonVerdict, StreamSettings, play
from crl.envs.places import PROBE_LAYOUTS
from crl.manager.ops import parse_ops
from crl.models.drills.alfworld import answer, known, refinement
from crl.models.drills.alfworld_chores import (
    ACTOR_CHORES,
    ASKING_CHORES,
    EXTRACTOR_CHORES,
    PERSONAS,
    TURNS,
    Chores,
)
from crl.models.drills.alfworld_houses import SmallHouse
from crl.models.drills.alfworld_personas import SearchingPlayer
from crl.models.drills.drill import Episode, hit
from crl.types import Segment, Task

MUG = Chore("pick_and_place_simple", "mug", "shelf")
ADVISOR = HouseAdvisor()


def conversation(*texts: str, goal: str = "the jade attic: put a mug in shelf.") -> list[Segment]:
    """Return a goal, followed by texts of the house and the agent in turn. The house is first."""
    said = [
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    ]
    return [Segment("user", goal, "task"), *said]


SEARCH = conversation(
    "see cabinet 1, desk 1, shelf 1", "go to shelf 1", "shelf 1: nothing", "go to cabinet 1",
    "cabinet 1 closed", "look", "at cabinet 1", "go to desk 1", "desk 1: mug 1, pen 2",
    "take mug 1", "took mug 1", "go to cabinet 1", "cabinet 1 closed",
)  # fmt: skip


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", LESSONS)
def test_a_lesson_is_read_as_what_it_is(kind: str) -> None:
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
def test_what_is_no_lesson(text: str) -> None:
    assert read(text, MUG) == ("other", "")


def test_an_episode_in_few_words() -> None:
    assert digest(SEARCH) == "mug in desk 1\npen in desk 1\nlooked in shelf 1, desk 1"
    assert digest(SEARCH[:6]) == "mug not seen\nnothing else\nlooked in shelf 1"
    assert digest(SEARCH[:2]) == "mug not seen\nnothing else\nlooked in nothing"


def test_where_a_thing_was_seen_first_counts() -> None:
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


def test_the_advisor_tells_the_truth_of_every_visit() -> None:
    for i, task in enumerate(probe_tasks(60)):
        wanted = read_chore(task.goal).thing
        right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, random.Random(i))
        assert SMALL_SPEC.revisit
        visited = SMALL_SPEC.revisit(task, 3)
        house = SmallHouse()
        house.reset(visited)
        where = {place for name, place in house.where.items() if name.startswith(f"{wanted} ")}
        assert right.removeprefix(f"{wanted} is in ").removesuffix(".") in where
        assert wrong.removeprefix(f"{wanted} is in ").removesuffix(".") in {*places(task)} - where
        assert ADVISOR.judge(visited, right) == LessonVerdict("where", correct=True)
        assert ADVISOR.judge(visited, wrong) == LessonVerdict("wrong where", correct=False)
        assert ADVISOR.judge(visited, "be careful.") == LessonVerdict("careful", correct=False)
        assert int(task.params["lgen"]) in PROBE_LAYOUTS
    assert ADVISOR.informative(SEARCH)
    assert not ADVISOR.informative(SEARCH[:8])


# ── houses without TextWorld ──────────────────────────────────────────────────────────────────────


def check_words(houses: int, turns: int) -> None:
    """Check that the engine and the house give the same texts for the same commands.

    Commands that no demonstrator gives are left out.
    """
    pytest.importorskip("alfworld")
    from crl.envs.alfworld.game import AlfworldGame

    engine, house, rng = AlfworldGame("compact"), SmallHouse(), random.Random(0)
    for task in demonstration_tasks(houses):
        assert engine.reset(task) == house.reset(task)
        for _ in range(turns):
            fit = {
                f"move {thing} to {place}"
                for thing in house.where
                for place in places(task)
                if holds(place, thing)
            }
            may = [
                c
                for c in engine.admissible
                if not c.startswith(("examine", "slice", "move")) or c in fit
            ]
            assert may == [c for c in house.admissible if not c.startswith("examine")]
            leading = [c for c in may if not c.startswith(("go to", "look", "inventory"))]
            command = rng.choice(
                rng.choice([leading or may, may, [*may, "go to the moon 1", "take"]])
            )
            told, said = engine.step(command), house.step(command)
            assert (told.text, told.done, told.success, told.valid) == (
                said.text,
                said.done,
                said.success,
                said.valid,
            )
            if told.done:
                break
    engine.close()


def holds(place: str, thing: str) -> bool:
    kinds = {kind.lower(): things.lower().split() for kind, things in small.HOLDS.items()}
    return thing.split()[0] in kinds[place.split()[0]]


def test_houses_without_textworld_say_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    check_words(12, 40)


@pytest.mark.soak
def test_many_houses_without_textworld_say_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    check_words(300, 60)


def test_the_compact_turns_suffice_to_look_everywhere_and_not_to_play_at_random() -> None:
    """Check that the turns suffice for a player but not for random commands.

    The scripted player wins in at least 95 % of the houses, random commands in at most 10 %.
    """
    tasks, house, rng = (
        SMALL_SPEC.eval_tasks("new", 128, 0, StreamSettings()),
        SmallHouse(),
        random.Random(0),
    )
    assert load(["alfworld"]).tasks["alfworld"].turns == TURNS
    scripted = [
        play(house, task, SMALL_SPEC.scripted_player(random.Random(i)), TURNS).success
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


def told(advice: str, tasks: Sequence[Task], chores: Chores = ACTOR_CHORES) -> list[Episode]:
    return list(
        replace(chores, advice=((advice, 1.0),), slip=0.0).episodes(random.Random(1), tasks)
    )


@pytest.mark.parametrize("chores", [ACTOR_CHORES, ASKING_CHORES])
def test_demonstrations_are_episodes_of_the_game(chores: Chores) -> None:
    """Check that the commands give the same texts again and that all of them are valid."""
    house = SmallHouse()
    for episode in chores.episodes(random.Random(0), demonstration_tasks(100)):
        said = [segment.text for segment in episode.segments if segment.origin == "env"]
        assert said[0] == house.reset(episode.task)
        results = [house.step(command) for command in commands(episode.segments)]
        assert [result.text for result in results] == said[1:]
        assert all(result.valid for result in results)
        assert (
            [result.success for result in results].index(True) == len(results) - 1
            if episode.success
            else len(results) == TURNS
        )


def test_right_advice_helps_and_wrong_advice_does_not() -> None:
    tasks = demonstration_tasks(300)
    success = {
        advice: sum(episode.success for episode in told(advice, tasks)) / 300
        for advice in ("none", "right", "random")
    }
    assert 0.4 <= success["none"] <= 0.6
    assert success["right"] >= success["none"] + 0.2
    assert success["random"] <= success["right"] - 0.15


def test_an_agent_goes_where_it_is_told_at_once() -> None:
    searching = replace(ACTOR_CHORES, personas=((SearchingPlayer, 1.0),))
    for advice in ("right", "random"):
        for episode in told(advice, demonstration_tasks(60), searching):
            assert episode.hint
            place = read(episode.hint.text, read_chore(episode.task.goal))[1]
            assert commands(episode.segments)[0] == f"go to {place}"


def test_personas_win_more_or_less_often() -> None:
    tasks = demonstration_tasks(150)
    for persona, _ in PERSONAS:
        alone = Chores(((persona, 1.0),))
        rate = sum(episode.success for episode in alone.episodes(random.Random(0), tasks)) / len(
            tasks
        )
        assert rate >= 0.85 if persona is SearchingPlayer else 0.2 <= rate <= 0.95


def test_agents_ask_once_and_soon_and_not_for_what_they_have_seen() -> None:
    asked = 0
    for episode in ASKING_CHORES.episodes(random.Random(0), demonstration_tasks(200)):
        at = [
            number
            for number, segment in enumerate(episode.segments)
            if segment.origin == "tool_call"
        ]
        asked += len(at)
        if at:
            assert len(commands(episode.segments[: at[0]])) <= 2
            assert not ADVISOR.informative(episode.segments[: at[0]])
            reply, action = episode.segments[at[0] + 1 : at[0] + 3]
            assert reply.origin == "tool_result"
            if reply.text.startswith("go to "):
                assert action.text in (
                    reply.text.removesuffix("."),
                    "look",
                    "inventory",
                ) or action.text.startswith(("open ", "go to "))
    assert asked >= 50


# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


def test_what_the_extractor_is_taught_of_an_episode_is_true_of_it() -> None:
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


def test_a_hint_is_corrected_by_what_was_seen() -> None:
    (task,) = demonstration_tasks(1)
    wrong = Episode(task, hit("mug is in shelf 1.", task), tuple(SEARCH), success=False)
    assert answer("where", wrong) == '[{"op":"update","target":1,"text":"mug is in desk 1."}]'
    assert (
        answer("where", replace(wrong, hint=hit("pen is in shelf 1.", task)))
        == '[{"op":"add","text":"mug is in desk 1."}]'
    )
    assert answer("where", replace(wrong, segments=tuple(SEARCH[:6]))) == '[{"op":"return"}]'
    assert answer("first", wrong) == '[{"op":"add","text":"look in shelf 1 first."}]'


@pytest.mark.parametrize(
    ("seen", "text", "written"),
    [
        (2, "mug is in desk 1.", '[{"op":"refine","text":"go to desk 1."}]'),
        (2, "pen is in desk 1.", '[{"op":"return"}]'),
        (4, "mug is in shelf 1.", '[{"op":"return"}]'),  # the agent has looked there
        (10, "mug is in cabinet 1.", '[{"op":"return"}]'),  # the agent has seen a mug
    ],
)
def test_a_lesson_is_fitted_to_where_the_agent_is(seen: int, text: str, written: str) -> None:
    assert refinement(SEARCH[:seen], text) == written


def test_most_of_what_is_known_of_a_place_is_about_its_thing() -> None:
    (task,) = demonstration_tasks(1)
    rng = random.Random(0)
    about = [read(known(task, rng), read_chore(task.goal))[0] == "where" for _ in range(300)]
    assert 0.5 <= sum(about) / 300 <= 0.8
    assert {*true_places(task)} < {*places(task)}
    assert task.name == SMALL
