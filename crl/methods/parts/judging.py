"""Parts of the actor-critic exchange: what the agent is told of an experience that it is to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.methods.parts.distilling import quoted
from crl.prompts import fill
from crl.protocols import Hit
from crl.types import Segment, Task


@dataclass(frozen=True)
class CompactCriticPrompt:
    """`CriticPromptWriter` for tiny agents: goal, experience, and how often in ten the agent succeeds without one. Where that is not known
    the line is left out, a form that the bundled actor was not taught."""

    def __call__(self, task: Task, hit: Hit, rate: float | None) -> Sequence[Segment]:
        won = [] if rate is None else [f"won {round(10 * rate)} of 10"]
        lines = [task.goal, f"hint 1 {hit.text}", *won, "judge"]
        return [Segment("user", "\n".join(lines), "task")]


@dataclass(frozen=True)
class FullCriticPrompt:
    """`CriticPromptWriter` for language models: the prompt `critic`. template: its text. Goal and advice are indented and so cannot pass
    for a line of the prompt."""

    template: str

    def __call__(self, task: Task, hit: Hit, rate: float | None) -> Sequence[Segment]:
        known = "not known yet" if rate is None else f"{rate:.0%} of the last episodes"
        text = fill(self.template, goal=quoted(task.goal), experience=quoted(hit.text), rate=known)
        return [Segment("user", text, "task")]
