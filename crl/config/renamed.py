"""Old keys of renamed settings. They are refused, but translated in saved configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

RENAMED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "rollout.env_deadline": "rollout.env_timeout",
        "extractor.lease": "extractor.answer_timeout",
        "bank.cap": "bank.max_per_goal",
        "bank.size": "bank.max_entries",
        "bank.vote_out": "bank.evict_votes",
        "bank.duplicate": "bank.duplicate_similarity",
        "retrieval.trials": "retrieval.trial_share",
        "retrieval.lam": "retrieval.count_penalty",
        "ask.deadline": "ask.timeout",
        "critic.enough": "critic.min_episodes",
        "complementary.guided": "complementary.guided_share",
        "complementary.listening": "complementary.lift_coef",
        "learner.deadline": "learner.timeout",
        "tasks.NAME.turns": "tasks.NAME.max_turns",
        "tasks.NAME.overtime": "tasks.NAME.extra_turns",
        "tasks.NAME.eval.known": "tasks.NAME.eval.seen",
        "tasks.NAME.eval.new": "tasks.NAME.eval.unseen",
        "tasks.NAME.eval.online": "tasks.NAME.eval.online_places",
        "tasks.NAME.eval.probe": "tasks.NAME.eval.probe_places",
    }
)
"""Current key of each renamed setting, by its old key. A key keeps its section."""


def current_key(key: str) -> str | None:
    """Return the current key of a renamed setting, or None if `key` was not renamed.

    The settings of a task may be in its `[compact]` table: tasks.room.compact.turns.
    """
    table, _, name = key.rpartition(".")
    parts = table.split(".")
    if parts[0] == "tasks" and len(parts) > 1:
        inside = parts[3:] if parts[2:3] == ["compact"] else parts[2:]
        parts = ["tasks", "NAME", *inside]
    current = RENAMED_KEYS.get(".".join([*parts, name]))
    return f"{table}.{current.rpartition('.')[2]}" if current else None


def upgrade(data: Any) -> None:
    """Rename the old keys of a saved config, in place.

    An old key is kept, and later refused, if its current key is set too.
    """
    for old, current in RENAMED_KEYS.items():
        *path, old_name = old.split(".")
        name = current.rpartition(".")[2]
        for section in _sections(data, path):
            if old_name in section and name not in section:
                section[name] = section.pop(old_name)


def _sections(table: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the existing sections at `path`. NAME stands for every task."""
    if not isinstance(table, dict):
        return
    if not path:
        yield table
        return
    for name in list(table) if path[0] == "NAME" else path[:1]:
        yield from _sections(table.get(name), path[1:])
