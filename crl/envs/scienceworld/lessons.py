"""Lessons about ScienceWorld for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence. A useful lesson can be followed literally: an agent that reads "focus dove
egg in outside." goes outside and focuses on the dove egg. The other kinds are true, useless or
misleading. An extractor has to learn which kinds are worth writing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.curriculum import LessonVerdict
from crl.envs.scienceworld.player import LOCATIONS, NON_LIVING, is_animal
from crl.envs.scienceworld.tasks import animals
from crl.types import Segment, Task

LESSONS = {
    "focus": "focus {thing} in {place}.",
    "never": "never focus {thing}.",
    "visit": "go {place} first.",
    "look": "look around first.",
    "careful": "be careful.",
    "time": "every move takes time.",
}
"""Kinds of lesson → their wording."""

_PATTERNS = {
    kind: re.compile(
        re.escape(text)
        .replace(r"\{thing\}", r"(?P<thing>[a-z ]+?)")
        .replace(r"\{place\}", f"(?P<place>{'|'.join(LOCATIONS)})")
    )
    for kind, text in LESSONS.items()
}


def lesson(kind: str, thing: str = "", place: str = "") -> str:
    """Return the lesson of this kind about a thing ("dove egg") and a location ("outside")."""
    return LESSONS[kind].format(thing=thing, place=place)


def read(text: str) -> tuple[str, str, str]:
    """Return (kind, thing, place) of a lesson.

    The kind is "other" if the text is not one of `LESSONS`. Thing and place are empty if the lesson
    names none.
    """
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            named = match.groupdict()
            return kind, named.get("thing", ""), named.get("place", "")
    return "other", "", ""


# ── episode digests ───────────────────────────────────────────────────────────────────────────────

_FOCUS = re.compile(r"focus (?:on )?(.+)")
_LOCATION = re.compile(f"({'|'.join(LOCATIONS)}): .+")


def digest(segments: Sequence[Segment]) -> str:
    """Summarise an episode of the compact rendering, from its texts alone.

    The digest holds the thing on which the agent focused, and all visited locations, in order:

        right dove egg in outside        (or: wrong axe in outside, or: no focus)
        visited hallway, outside, kitchen
    """
    focus = focused(segments)
    outcome = "{} {} in {}".format(*focus) if focus else "no focus"
    return f"{outcome}\nvisited {', '.join(visited_locations(segments)) or 'nothing'}"


def focused(segments: Sequence[Segment]) -> tuple[str, str, str] | None:
    """Return ("right" or "wrong", thing, location) of the last focus, or None if there was none."""
    location, thing, found = "", "", None
    for segment in segments:
        if segment.origin == "policy":
            match = _FOCUS.fullmatch(segment.text)
            thing = match[1] if match else ""
        elif segment.origin == "env":
            if match := _LOCATION.fullmatch(segment.text):
                location = match[1]
            elif thing and location and segment.text in (f"focus on {thing}", "done."):
                found = "right", thing, location
            elif thing and location and segment.text == "failed.":
                found = "wrong", thing, location
    return found


def visited_locations(segments: Sequence[Segment]) -> list[str]:
    """Return the locations that the agent saw, in order, without repetition."""
    seen = (_LOCATION.fullmatch(segment.text) for segment in segments if segment.origin == "env")
    return list(dict.fromkeys(match[1] for match in seen if match))


# ── ground truth, for diagnostics only ────────────────────────────────────────────────────────────


class ScienceAdvisor:
    """`Advisor` of the tasks for tiny models. Right advice names a right thing and its location."""

    def right(self, task: Task) -> str:
        return lesson("focus", right_things(task)[0], "outside")

    def wrong(self, task: Task, rng: random.Random) -> str:
        return lesson("focus", rng.choice(wrong_things(task)), "outside")

    def judge(self, task: Task, text: str) -> LessonVerdict:
        kind, thing, place = read(text)
        if kind != "focus":
            return LessonVerdict(kind, correct=False)
        correct = place == "outside" and thing in right_things(task)
        return LessonVerdict("focus" if correct else "wrong focus", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        focus = focused(segments)
        return focus is not None and focus[0] == "right"


def right_things(task: Task) -> tuple[str, ...]:
    """Return the things outside on which the agent may focus."""
    name = task.params["task"]
    if name == "find-non-living-thing":
        return (NON_LIVING,)
    return animals(task) if name == "find-animal" else animals(task)[:1]


def wrong_things(task: Task) -> tuple[str, ...]:
    """Return the things outside on which the agent may not focus."""
    name = task.params["task"]
    if name == "find-non-living-thing":
        return tuple(thing for thing in animals(task) if is_animal(thing))
    return (NON_LIVING,) if name == "find-animal" else animals(task)[1:]
