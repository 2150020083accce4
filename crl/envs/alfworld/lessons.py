"""Lessons about a small house for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence. Diagnostics compare lessons with the ground truth. A useful lesson can be
followed literally: an agent that reads "mug is in cabinet 2." goes to cabinet 2. The other kinds
are true, useless or misleading. An extractor has to learn which kinds are worth writing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.alfworld import small
from crl.envs.alfworld.house import Chore, numbered, read_chore
from crl.envs.curriculum import LessonVerdict
from crl.types import Segment, Task, task_text

LESSONS = {
    "where": "{thing} is in {place}.",
    "aside": "{thing} is in {place}.",
    "first": "look in {place} first.",
    "open": "open what is closed.",
    "look": "look around first.",
    "tidy": "close what is open.",
    "careful": "be careful.",
    "time": "every move takes time.",
}
"""Kinds of lesson → their wording.

`where` is about the thing of the chore, `aside` is about another thing.
"""

FROM_HERE = "go to {place}."
"""Answer to an agent that asks in the middle of an episode.

It is not a kind of lesson, because no episode can teach a way that begins in its middle.
"""

_PATTERNS = {
    kind: re.compile(
        re.escape(text)
        .replace(r"\{thing\}", r"(?P<thing>[a-z]+)")
        .replace(r"\{place\}", r"(?P<place>[a-z]+ \d)")
    )
    for kind, text in LESSONS.items()
    if kind != "aside"
}


def lesson(kind: str, thing: str = "", place: str = "") -> str:
    """Return the lesson of this kind.

    `thing` is a type, "mug". `place` is the name of a receptacle, "cabinet 2".
    """
    return LESSONS[kind].format(thing=thing, place=place)


def from_here(place: str) -> str:
    """Return the answer to an agent that asks on its way."""
    return FROM_HERE.format(place=place)


def read(text: str, chore: Chore) -> tuple[str, str]:
    """Return (kind, place) of a lesson about this chore.

    The kind is "other" if the text is not one of `LESSONS`. The place is empty if the lesson names
    none.
    """
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            named = match.groupdict()
            return "aside" if kind == "where" and named[
                "thing"
            ] != chore.thing else kind, named.get("place", "")
    return "other", ""


# ── episode digests ───────────────────────────────────────────────────────────────────────────────

_CONTENTS = re.compile(r"([a-z]+ \d): (.+)")


def digest(segments: Sequence[Segment]) -> str:
    """Summarise an episode of the compact rendering, from its texts alone.

    The digest holds the receptacles where the thing of the chore and another thing were first seen.
    It ends with all receptacles that the agent looked into, in order:

        mug in cabinet 2                            (or: mug not seen)
        plate in countertop 1                       (or: nothing else)
        looked in countertop 1, cabinet 2           (or: looked in nothing)
    """
    wanted, seen = chore_of(segments).thing, first_sightings(segments)
    other = other_sighting(segments)
    return "\n".join(
        [
            f"{wanted} in {seen[wanted]}" if wanted in seen else f"{wanted} not seen",
            f"{other[0]} in {other[1]}" if other else "nothing else",
            f"looked in {', '.join(visited_receptacles(segments)) or 'nothing'}",
        ]
    )


def chore_of(segments: Sequence[Segment]) -> Chore:
    """Return the chore of an episode. Raise `ValueError` if its goal names none."""
    return read_chore(task_text(segments))


def first_sightings(segments: Sequence[Segment]) -> dict[str, str]:
    """Return type of thing → the receptacle where it was first seen, in order."""
    seen: dict[str, str] = {}
    for place, things in _contents(segments):
        for thing in things:
            seen.setdefault(thing, place)
    return seen


def other_sighting(segments: Sequence[Segment]) -> tuple[str, str] | None:
    """Return the first seen thing that the chore is not about, and its receptacle.

    Return None if there is none.
    """
    wanted = chore_of(segments).thing
    return next(
        ((thing, place) for thing, place in first_sightings(segments).items() if thing != wanted),
        None,
    )


def visited_receptacles(segments: Sequence[Segment]) -> list[str]:
    """Return the receptacles that the agent looked into, in order, without repetition."""
    return list(dict.fromkeys(place for place, _ in _contents(segments)))


def _contents(segments: Sequence[Segment]) -> list[tuple[str, list[str]]]:
    """Return (receptacle, types of the things in it) of every look into a receptacle, in order."""
    found = (_CONTENTS.fullmatch(segment.text) for segment in segments if segment.origin == "env")
    return [
        (match[1], [name.rpartition(" ")[0] for name in match[2].split(", ") if name != "nothing"])
        for match in found
        if match
    ]


# ── ground truth, for diagnostics only ────────────────────────────────────────────────────────────


class HouseAdvisor:
    """`Advisor` of the small houses.

    Right advice says where the thing of the chore is.
    """

    def right(self, task: Task) -> str:
        return lesson("where", read_chore(task.goal).thing, true_receptacles(task)[0])

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = true_receptacles(task)
        return lesson(
            "where",
            read_chore(task.goal).thing,
            rng.choice([place for place in receptacle_names(task) if place not in right]),
        )

    def judge(self, task: Task, text: str) -> LessonVerdict:
        kind, place = read(text, read_chore(task.goal))
        if kind != "where":
            return LessonVerdict(kind, correct=False)
        correct = place in true_receptacles(task)
        return LessonVerdict("where" if correct else "wrong where", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return chore_of(segments).thing in first_sightings(segments)


def receptacle_names(task: Task) -> list[str]:
    """Return the names of the receptacles of the task's house."""
    house = small.house(int(task.params["lgen"]), int(task.params["core"]))
    return [f"{kind.lower()} {number}" for kind, number in numbered(house.receptacles)]


def true_receptacles(task: Task) -> list[str]:
    """Return the receptacles with the thing of the chore.

    They do not change while the place exists. There are two entries if the chore needs two things.
    """
    house, names = (
        small.house(int(task.params["lgen"]), int(task.params["core"])),
        receptacle_names(task),
    )
    return [names[index] for kind, index in house.things if kind == house.chore.thing]
