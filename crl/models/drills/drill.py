"""What drills are made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from crl.models.warm_start import Demonstration
from crl.protocols import Hit
from crl.types import ExperienceUse, Segment, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Drill:
    """A kind of demonstration: `make(rng, n)` yields n of them; the recipe takes `count`."""

    name: str
    count: int
    make: Callable[[random.Random, int], Iterator[Demonstration]]


def said(text: str) -> Segment:
    """What the demonstrator says."""
    return Segment("assistant", text, "policy")


def op(kind: str, **fields: int | str | Sequence[int]) -> str:
    """An extractor's answer of one op, in its one spelling."""
    return json.dumps([{"op": kind, **fields}], separators=(",", ":"))


def hit(text: str, task: Task) -> Hit:
    """A lesson as if a bank had it of the task's goal."""
    return Hit(text, ExperienceUse("drill", 1, "drill", "start"), task.goal)


def draw(shares: Sequence[tuple[T, float]], rng: random.Random) -> T:
    """One of the values, by their shares."""
    values, weights = zip(*shares, strict=True)
    return rng.choices(values, weights)[0]
