"""What can be said about a small house in one sentence, for the bundled tiny models: lessons, the episode in few words, and the truth
that diagnostics hold them against.

A lesson must be copyable: an agent that is told "mug is in cabinet 2." goes to cabinet 2. The other kinds are true, useless or
misleading; which of them are worth writing is what an extractor has to learn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.alfworld import small
from crl.envs.alfworld.house import Chore, numbered, read_chore
from crl.envs.base import Verdict
from crl.types import Segment, Task

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
"""The kinds of lesson, and their wording: `where` is the thing that the chore is about, `aside` another."""

FROM_HERE = "go to {place}."
"""What an agent that asks on its way is told. No kind of lesson: an episode teaches nothing that begins in the middle of it."""

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
    """The lesson of this kind. thing: its type, "mug"; place: a receptacle by name, "cabinet 2"."""
    return LESSONS[kind].format(thing=thing, place=place)


def from_here(place: str) -> str:
    """The answer to an agent on its way."""
    return FROM_HERE.format(place=place)


def read(text: str, chore: Chore) -> tuple[str, str]:
    """(kind, place) of a lesson on this chore; kind "other" when it is none of these, no place where it names none."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            named = match.groupdict()
            return "aside" if kind == "where" and named[
                "thing"
            ] != chore.thing else kind, named.get("place", "")
    return "other", ""


# ── the episode in few words ────────────────────────────────────────────────────────────────────────────────────────

_SHOWN = re.compile(r"([a-z]+ \d): (.+)")


def digest(segments: Sequence[Segment]) -> str:
    """What an episode of the compact rendering comes to, read off its texts alone: where the thing that the chore is about was seen
    first, where another was, and where the agent looked, in order.

    mug in cabinet 2 / plate in countertop 1 / looked in countertop 1, cabinet 2        (or: mug not seen / nothing else)
    """
    wanted, seen = chore_of(segments).thing, sights(segments)
    aside = other_sight(segments)
    return "\n".join(
        [
            f"{wanted} in {seen[wanted]}" if wanted in seen else f"{wanted} not seen",
            f"{aside[0]} in {aside[1]}" if aside else "nothing else",
            f"looked in {', '.join(visits(segments)) or 'nothing'}",
        ]
    )


def chore_of(segments: Sequence[Segment]) -> Chore:
    """The chore of an episode. Raises `ValueError` when its goal names none."""
    return read_chore("\n".join(segment.text for segment in segments if segment.origin == "task"))


def sights(segments: Sequence[Segment]) -> dict[str, str]:
    """Type of thing → where one was seen first, in order."""
    seen: dict[str, str] = {}
    for place, things in _shown(segments):
        for thing in things:
            seen.setdefault(thing, place)
    return seen


def other_sight(segments: Sequence[Segment]) -> tuple[str, str] | None:
    """The first thing that was seen beside the one that the chore is about, and where; None when there was none."""
    wanted = chore_of(segments).thing
    return next(
        ((thing, place) for thing, place in sights(segments).items() if thing != wanted), None
    )


def visits(segments: Sequence[Segment]) -> list[str]:
    """The receptacles that the agent looked into, in order, each once."""
    return list(dict.fromkeys(place for place, _ in _shown(segments)))


def _shown(segments: Sequence[Segment]) -> list[tuple[str, list[str]]]:
    """What was seen to lie where: (receptacle, types of things), in order."""
    found = (_SHOWN.fullmatch(segment.text) for segment in segments if segment.origin == "env")
    return [
        (match[1], [name.rpartition(" ")[0] for name in match[2].split(", ") if name != "nothing"])
        for match in found
        if match
    ]


# ── the truth, for diagnostics alone ────────────────────────────────────────────────────────────────────────────────


class HouseAdvisor:
    """`Advisor` of the small houses: right advice says where the thing is that the chore is about."""

    def right(self, task: Task) -> str:
        return lesson("where", read_chore(task.goal).thing, true_places(task)[0])

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = true_places(task)
        return lesson(
            "where",
            read_chore(task.goal).thing,
            rng.choice([place for place in places(task) if place not in right]),
        )

    def judge(self, task: Task, text: str) -> Verdict:
        kind, place = read(text, read_chore(task.goal))
        if kind != "where":
            return Verdict(kind, correct=False)
        correct = place in true_places(task)
        return Verdict("where" if correct else "wrong where", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return chore_of(segments).thing in sights(segments)


def places(task: Task) -> list[str]:
    """The receptacles of the task's place."""
    house = small.house(int(task.params["lgen"]), int(task.params["core"]))
    return [f"{kind.lower()} {number}" for kind, number in numbered(house.receptacles)]


def true_places(task: Task) -> list[str]:
    """Where the thing lies that the chore is about, as long as the place is there; two receptacles where it takes two things."""
    house, names = small.house(int(task.params["lgen"]), int(task.params["core"])), places(task)
    return [names[home] for kind, home in house.things if kind == house.chore.thing]
