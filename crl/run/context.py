"""What the agents of a run are told of their games: the same for a model and, in `crl play`, for a person. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from crl.config.schema import TaskConfig
from crl.envs.base import EnvSpec
from crl.methods.parts.asking import COMPACT_TOOL, full_tool
from crl.methods.parts.records import compact_record, full_record
from crl.methods.parts.rollouts import ChatContext
from crl.prompts import BUNDLED, Overrides, fill, prompt


def chat_context(
    tasks: Mapping[str, TaskConfig], specs: Mapping[str, EnvSpec], files: Overrides = BUNDLED, *,
    asks: bool = False, goal_keys: bool = False, records: bool = False,
) -> ChatContext:  # fmt: skip
    """By the tasks' renderings. asks: guided agents may ask; goal_keys: experiences are found by their goal; records: guided agents are
    told their experience's record."""
    full = [name for name, task in tasks.items() if task.rendering == "full"]
    tools = {
        name: full_tool(prompt("ask", files)) if name in full else COMPACT_TOOL for name in tasks
    }
    return ChatContext(
        {name: _instructions(task, specs[name], files) for name, task in tasks.items()},
        introductions=dict.fromkeys(full, prompt("experience", files)),
        tools=tools if asks else {},
        observed=frozenset(name for name, spec in specs.items() if spec.query_with_observation),
        goal_keys=goal_keys,
        records={name: full_record if name in full else compact_record for name in tasks}
        if records
        else {},
    )


def _instructions(task: TaskConfig, spec: EnvSpec, overrides: Overrides) -> str:
    """The system prompt; none for tiny models, which were taught the game's texts alone."""
    if task.rendering == "compact":
        return ""
    example = spec.actions[0] if spec.actions else "your action"
    return fill(
        prompt("actor", overrides), turns=task.turns, actions=spec.action_format, example=example
    )
