"""Sampled episodes for readers: a guided and a free member of one group, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.records.shards import Record, read_records, shards
from crl.types import GUIDANCE_ORIGINS
from crl.wording import SEGMENT_TITLES

PAIRS_PER_TASK = 2
"""Maximum number of pairs of each task."""

MOST_STEPS = 10
"""Maximum number of recorded steps in which pairs are looked for."""

MOST_SEGMENTS = 60
"""Maximum number of texts of an episode that are shown."""


@dataclass(frozen=True)
class Message:
    """Text of a conversation."""

    title: str
    kind: str
    """Kind for its style: guidance, answer or other."""
    text: str
    reward: float | None = None
    """Reward of the turn that the text ended."""


@dataclass(frozen=True)
class Episode:
    """A recorded episode."""

    record: Mapping[str, Any]
    messages: Sequence[Message]
    left_out: int
    """Number of texts that are not shown."""

    @property
    def id(self) -> str:
        return "/".join(str(self.record[name]) for name in ("step", "group", "member"))


@dataclass(frozen=True)
class Pair:
    """Two members of a group. They play the same task."""

    task: str
    goal: str
    guided: Episode
    free: Episode


def sampled_pairs(folder: Path, tasks: Sequence[str]) -> list[Pair]:
    """Return pairs of the last recorded steps, at most `PAIRS_PER_TASK` of each task.

    Pairs in which the guided member won and the free one lost come first. At most `MOST_STEPS`
    steps are read.
    """
    pairs: dict[str, list[Pair]] = {task: [] for task in tasks}
    for path in list(reversed(shards(folder).values()))[:MOST_STEPS]:
        for pair in _pairs(read_records(path)):
            pairs.setdefault(pair.task, []).append(pair)
        if all(len(found) >= PAIRS_PER_TASK for found in pairs.values()):
            break
    ordered = [sorted(found, key=_order)[:PAIRS_PER_TASK] for found in pairs.values()]
    return [pair for found in ordered for pair in found]


def _order(pair: Pair) -> tuple[int, int]:
    guided, free = pair.guided.record["success"], pair.free.record["success"]
    return (free - guided, len(pair.guided.messages) + len(pair.free.messages))


def _pairs(records: Iterable[Record]) -> Iterator[Pair]:
    groups: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if not record["error"]:
            groups[record["group"]].append(record)
    for members in groups.values():
        guided = [r for r in members if r["condition"] == "guided" and r["used"]]
        free = [r for r in members if r["condition"] == "free"]
        if guided and free:
            guided.sort(key=lambda r: -r["success"])
            free.sort(key=lambda r: r["success"])
            yield Pair(guided[0]["task"], guided[0]["goal"], episode(guided[0]), episode(free[0]))


def episode(record: Record, most: int = MOST_SEGMENTS) -> Episode:
    """Return a recorded episode with its first texts, at most `most`."""
    messages, turn = [], 0
    for segment in record["segments"]:
        origin, reward = segment["origin"], None
        if origin == "policy":
            rewards = record["turn_rewards"]
            reward = rewards[turn] if turn < min(record["turns"], len(rewards)) else None
            turn += 1
        kind = (
            "guidance" if origin in GUIDANCE_ORIGINS
            else "answer" if segment["role"] == "assistant" else "other"
        )  # fmt: skip
        messages.append(Message(SEGMENT_TITLES[origin], kind, segment["text"], reward))
    shown = messages[:most]
    return Episode(record, shown, len(messages) - len(shown))
