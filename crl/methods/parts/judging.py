"""Parts of the actor as critic: its prompts for judging an experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.methods.parts.distilling import quoted
from crl.prompts import fill
from crl.protocols import Hit
from crl.types import Segment, Task


@dataclass(frozen=True)
class CompactCriticPrompt:
    """`CriticPromptWriter` for tiny agents.

    The prompt holds the goal, the experience, and how many of ten episodes the agent wins without
    experience. The last line is omitted if the rate is unknown; the bundled actor was not trained
    on this form.
    """

    def __call__(self, task: Task, hit: Hit, rate: float | None) -> Sequence[Segment]:
        rate_lines = [] if rate is None else [f"won {round(10 * rate)} of 10"]
        lines = [task.goal, f"hint 1 {hit.text}", *rate_lines, "judge"]
        return [Segment("user", "\n".join(lines), "task")]


@dataclass(frozen=True)
class FullCriticPrompt:
    """`CriticPromptWriter` for language models: it fills the prompt `critic`.

    Goal and experience are indented, so that they cannot be mistaken for a line of the prompt.
    """

    template: str
    """Text of the prompt `critic`."""

    def __call__(self, task: Task, hit: Hit, rate: float | None) -> Sequence[Segment]:
        rate_text = "not known yet" if rate is None else f"{rate:.0%} of the last episodes"
        text = fill(
            self.template, goal=quoted(task.goal), experience=quoted(hit.text), rate=rate_text
        )
        return [Segment("user", text, "task")]
