"""Parts of distillation: which episodes are distilled, and what the extractor is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from crl.errors import RolloutError
from crl.manager import DistilRequest
from crl.prompts import fill
from crl.tokens import ChatRenderer
from crl.types import Origin, Segment, Trajectory

Digest = Callable[[Sequence[Segment]], str]
"""An episode in few words, from its texts alone."""

SPEAKERS: Mapping[Origin, str] = {
    "env": "environment",
    "policy": "agent",
    "tool_call": "agent asks",
    "tool_result": "answer",
}
"""Whose turns a transcript holds. Instructions, goal, tools and advice are said elsewhere, or not at all."""

INDENT = "  "

REWORDED = " (reworded)"
"""What the prompt `vote` tells advice by that the agent did not read in the words of the experience."""


def whole_text(segments: Sequence[Segment]) -> str:
    """The `Digest` of an environment that has none of its own: everything that was said."""
    return "\n".join(segment.text for segment in segments if segment.origin in ("env", "policy"))


@dataclass(frozen=True)
class EveryEpisode:
    """`Distiller`: guided and free, won and lost (CRL §3.2.1); only what could not be played is left out."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [t for t in trajectories if t.error is None]


@dataclass(frozen=True)
class NoEpisode:
    """`Distiller`: the bank stays as it is."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return ()


@dataclass(frozen=True)
class CompactDistilPrompt:
    """`PromptWriter` for tiny extractors: goal, what guided the episode, its digest, its outcome. digests: by task name."""

    digests: Mapping[str, Digest]

    def __call__(self, request: DistilRequest) -> Sequence[Segment]:
        hints = [f"hint {number} {hit.text}" for number, hit in enumerate(request.shown, start=1)]
        outcome = "success" if request.success else "failure"
        lines = [
            request.task.goal,
            *hints,
            self.digests[request.task.name](request.segments),
            outcome,
        ]
        return [Segment("user", "\n".join(lines), "task")]


@dataclass(frozen=True)
class FullDistilPrompt:
    """`PromptWriter` for language models: the prompt `distil`, one user message, since some chat templates know no system.

    template: its text; renderer: the extractor's; max_tokens: of the rendered prompt, the extractor's context less what it may
    answer; vote: what asks for votes on what guided the episode as it stands, None = nothing does. A longer prompt loses the middle of its
    transcript; one without room for any raises `RolloutError`. What comes from the episode is indented and so cannot pass for a line
    of the prompt. The agent's thinking stays in: it says why it acted so.
    """

    template: str
    renderer: ChatRenderer
    max_tokens: int
    vote: str | None = None

    def __call__(self, request: DistilRequest) -> Sequence[Segment]:
        votes = bool(self.vote) and not all(hit.use.reworded for hit in request.shown)
        experiences = [
            f"{number}.{REWORDED if votes and hit.use.reworded else ''}\n{quoted(hit.text)}"
            for number, hit in enumerate(request.shown, start=1)
        ]
        known = {
            "goal": quoted(request.task.goal),
            "outcome": _outcome(request),
            "experiences": "\n".join(experiences) or "None: there is nothing to update.",
        }
        template = f"{self.template}\n\n{self.vote}" if votes else self.template
        return with_transcript(template, known, request.segments, self.renderer, self.max_tokens)


def _outcome(request: DistilRequest) -> str:
    if request.success:
        return "success"
    return "failure: the episode was cut off before it ended" if request.truncated else "failure"


def _transcript(segments: Sequence[Segment]) -> Iterator[str]:
    """Label and quoted text of every segment, by turns: turn 0 is what the agent saw first, turn n begins with its n-th reply."""
    turn = 0
    for segment in segments:
        turn += segment.origin == "policy"
        if segment.origin in SPEAKERS:
            yield f"[turn {turn}, {SPEAKERS[segment.origin]}]\n{quoted(segment.text)}"


def with_transcript(
    template: str,
    known: Mapping[str, str],
    segments: Sequence[Segment],
    renderer: ChatRenderer,
    max_tokens: int,
) -> list[Segment]:
    """The prompt with the transcript of `segments` in its slot, the middle left out where it would be longer than `max_tokens`.

    known: the other slots. Raises `RolloutError` where there is no room for any transcript.
    """

    def written(transcript: str) -> list[Segment]:
        return [Segment("user", fill(template, **known, transcript=transcript), "task")]

    def length(prompt: Sequence[Segment]) -> int:
        return len(renderer.encode(renderer.text(prompt)))

    transcript = "\n".join(_transcript(segments))
    prompt = written(transcript)
    if len(renderer.text(prompt).encode()) < max_tokens:
        return prompt  # it has no more tokens than bytes, and to count them takes milliseconds
    tokens, kept = length(prompt), len(transcript)
    rest = length(written("")) if tokens > max_tokens else 0
    while tokens > max_tokens:
        kept = int(0.95 * kept * (max_tokens - rest) / (tokens - rest)) if tokens > rest else 0
        if kept < 1:
            raise RolloutError(
                "prompt",
                f"{rest} tokens without a transcript leave no room for one in {max_tokens}",
            )
        prompt = written(_without_middle(transcript, kept))
        tokens = length(prompt)
    return prompt


def quoted(text: str) -> str:
    """The text as a prompt quotes it: every line indented."""
    return "\n".join(INDENT + line for line in text.splitlines()) or f"{INDENT}(nothing)"


def _without_middle(text: str, size: int) -> str:
    """The first and the last characters of a transcript, `size` together, and how many are missing between them."""
    head, tail = text[: size // 2], text[len(text) - size // 2 :]
    return (
        f"{head}\n[… {len(text) - len(head) - len(tail)} characters are left out …]\n{INDENT}{tail}"
    )
