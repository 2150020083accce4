"""Parts of search_and_ask: how the agent asks, and what the extractor is told of its question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crl.methods.parts.distilling import Digest, quoted, with_transcript
from crl.protocols import Hit, Question
from crl.tokens import ChatRenderer
from crl.types import Segment

COMPACT_OFFER, COMPACT_CALL, COMPACT_NOTHING = "you may ask.", "ask", "nothing is known."
"""What a tiny agent is told of the tool, how it calls it (with or without more words), and the reply when nothing is found."""

_CALL = re.compile(
    r"<search_and_ask>((?:(?!<search_and_ask>).)*?)</search_and_ask>", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class AskTool:
    """The tool as a task's agents know it. offer: tells of it, with a slot `{limit}` or without; query: what is asked in what follows the
    thinking, None where that is no call; nothing: the reply when nothing is found."""

    offer: str
    query: Callable[[str], str | None]
    nothing: str


def compact_query(answer: str) -> str | None:
    """The words behind the call."""
    call, *query = answer.split(maxsplit=1) or [""]
    return "".join(query).strip() if call.casefold() == COMPACT_CALL else None


def tagged_query(answer: str) -> str | None:
    """What the last `<search_and_ask>` tag holds, in any case, unless the agent answers after it: the last thing that it decides
    counts."""
    calls = list(_CALL.finditer(answer))
    return (
        calls[-1][1].strip()
        if calls and "<answer>" not in answer[calls[-1].end() :].lower()
        else None
    )


COMPACT_TOOL = AskTool(COMPACT_OFFER, compact_query, COMPACT_NOTHING)


def full_tool(offer: str) -> AskTool:
    """The tool of language models. offer: the prompt `ask`."""
    return AskTool(offer, tagged_query, "Nothing is known about that.")


@dataclass(frozen=True)
class FullRefinePrompt:
    """`RefinePromptWriter` for language models: the prompt `refine`, made as `FullDistilPrompt` makes its own."""

    template: str
    renderer: ChatRenderer
    max_tokens: int

    def __call__(self, question: Question, hit: Hit) -> Sequence[Segment]:
        known = {
            "goal": quoted(question.task.goal),
            "experience": quoted(hit.text),
            "question": quoted(question.query),
        }
        return with_transcript(
            self.template, known, question.segments, self.renderer, self.max_tokens
        )


@dataclass(frozen=True)
class CompactRefinePrompt:
    """`RefinePromptWriter` for tiny extractors: goal, what was found, the question, the episode so far. digests: by task name."""

    digests: Mapping[str, Digest]

    def __call__(self, question: Question, hit: Hit) -> Sequence[Segment]:
        asked = f"{COMPACT_CALL} {question.query}".rstrip()
        lines = [
            question.task.goal,
            f"hint 1 {hit.text}",
            self.digests[question.task.name](question.segments),
            asked,
        ]
        return [Segment("user", "\n".join(lines), "task")]
