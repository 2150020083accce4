"""Pairs of a goal and its right lesson, in several wordings, from the environments' advisors.

An advisor knows the right advice for a place. Its own lesson does not name the place, as those of
the bundled tiny models. A language model describes in its lesson the situation that the lesson is
for. The other wordings do so: a template of the task, drawn with a fixed seed, holds a description
of the goal and the advice.

* advisor: the advisor's own words
* same words: the description uses the words of the goal
* other words: each phrase of the goal is replaced by one of `paraphrases.toml`, which shares no
  word with it

Templates share no word with goals, except words such as "the" and "in".
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crl.config import load
from crl.envs.alfworld.house import read_chore
from crl.envs.alfworld.lessons import read as read_house_lesson
from crl.envs.keyroom.lessons import read as read_cells
from crl.envs.maze.lessons import read as read_way
from crl.envs.room.lessons import read as read_room_lesson
from crl.envs.webshop.lessons import read as read_shop_lesson
from crl.planning.tasks import probe_tasks, specs
from crl.seeds import generator
from crl.types import Task

PLACES = {"room": 150, "maze": 75, "keyroom": 75, "webshop": 75, "alfworld": 125}
"""Number of places by task; 500 in all, with different goals within a task."""
WORDINGS = ("advisor", "same words", "other words")

PHRASES = tomllib.loads(Path(__file__).with_name("paraphrases.toml").read_text("utf-8"))
"""Tables of `paraphrases.toml`."""


@dataclass(frozen=True)
class Pairs:
    """Goals of a task's places with their right lessons."""

    goals: list[str]
    lessons: Mapping[str, list[str]]
    """Wording → the lesson of each place."""
    right: NDArray[np.bool_]
    """[place, lesson]: whether the lesson of another place is right advice for the place too."""


def lesson_pairs(sizes: Mapping[str, int]) -> dict[str, Pairs]:
    """Return the pairs of each task, by its name. `sizes`: number of places of each task."""
    sets = [f"tasks.{task}.eval.probe_places={count}" for task, count in sizes.items()]
    config = load([*sizes], sets=sets)
    pairs = {}
    for name, probe in probe_tasks(config, specs(config)).items():
        own = [probe.advisor.right(place) for place in probe.places]
        right = [
            [probe.advisor.judge(place, text).correct for text in own] for place in probe.places
        ]
        lessons = {"advisor": own} | {
            wording: [
                written_out(name, number, place, text, other=wording == "other words")
                for number, (place, text) in enumerate(zip(probe.places, own, strict=True))
            ]
            for wording in WORDINGS[1:]
        }
        pairs[name] = Pairs([place.goal for place in probe.places], lessons, np.array(right))
    return pairs


def written_out(task: str, number: int, place: Task, lesson: str, *, other: bool) -> str:
    """Return the advisor's `lesson` with a description of its place.

    `number` is that of the place; it selects the template. `other`: whether the description is in
    other words than the goal.
    """
    template = generator(0, f"embedders/{task}", number).choice(PHRASES["templates"][task])
    text = template.format(**SLOTS[task](place, lesson, other))
    return text[0].upper() + text[1:]


def phrase(table: str, words: str, other: bool) -> str:
    return PHRASES[table][words] if other else words


def place_name(place: Task, other: bool) -> str:
    return " ".join(phrase("places", word, other) for word in str(place.params["place"]).split())


def room_slots(place: Task, lesson: str, other: bool) -> dict[str, str]:
    return {"place": place_name(place, other), "direction": str(read_room_lesson(lesson)[1])}


def maze_slots(place: Task, lesson: str, other: bool) -> dict[str, str]:
    return {"place": place_name(place, other), "route": ", ".join(read_way(lesson) or ())}


def keyroom_slots(place: Task, lesson: str, other: bool) -> dict[str, str]:
    cells = read_cells(lesson)
    assert cells, "the advisor names the cells"
    names = ("key_column", "key_row", "door_column", "door_row")
    numbers = (str(number + 1) for point in cells for number in point)
    return {"place": place_name(place, other), **dict(zip(names, numbers, strict=True))}


def webshop_slots(place: Task, lesson: str, other: bool) -> dict[str, str]:
    kind, first, second = place.goal.removeprefix("find me ").split(", ")
    return {
        "kind": phrase("products", kind, other),
        "first": phrase("attributes", first, other),
        "second": phrase("attributes", second, other),
        "brand": str(read_shop_lesson(lesson)[1]),
    }


def alfworld_slots(place: Task, lesson: str, other: bool) -> dict[str, str]:
    chore = read_chore(place.goal)
    wording = PHRASES["chores"][chore.kind][int(other)]
    return {
        "place": place_name(place, other),
        "chore": wording.format(
            thing=phrase("things", chore.thing, other),
            goal=phrase("things", chore.receptacle, other),
        ),
        "receptacle": read_house_lesson(lesson, chore)[1],
    }


SLOTS: dict[str, Callable[[Task, str, bool], dict[str, str]]] = {
    "room": room_slots,
    "maze": maze_slots,
    "keyroom": keyroom_slots,
    "webshop": webshop_slots,
    "alfworld": alfworld_slots,
}
"""Task → function that returns the slots of its templates, from the place and its lesson."""
