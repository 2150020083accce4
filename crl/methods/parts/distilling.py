"""Parts of distillation: the selection of episodes, and the prompts for the extractor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from crl.errors import RolloutError
from crl.manager import DistilRequest
from crl.modeling.tokens import ChatRenderer
from crl.prompts import fill
from crl.types import Origin, Segment, Trajectory

Digest = Callable[[Sequence[Segment]], str]
"""Function that describes an episode in few words, using only the texts of its segments.

It may raise `ValueError` for texts that its environment does not write.
"""

SPEAKERS: Mapping[Origin, str] = {
    "env": "environment",
    "policy": "agent",
    "tool_call": "agent asks",
    "tool_result": "answer",
}
"""Labels of the turns that a transcript contains, by origin.

Instructions, goal, tools and experiences are not part of the transcript.
"""

INDENT = "  "
"""Prefix of every quoted line."""

REWORDED_MARK = " (reworded)"
"""Mark of an experience that the agent read in reworded form; see the prompt `vote`."""


def turns_text(segments: Sequence[Segment]) -> str:
    """Return the text of all environment and agent turns.

    This is the `Digest` of environments that do not define one.
    """
    return "\n".join(segment.text for segment in segments if segment.origin in ("env", "policy"))


@dataclass(frozen=True)
class EveryEpisode:
    """`DistillationFilter` that selects all episodes: guided and free, won and lost (CRL §3.2.1).

    Only episodes with an error are excluded.
    """

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [t for t in trajectories if t.error is None]


@dataclass(frozen=True)
class FailedEpisodes:
    """`DistillationFilter` that selects the episodes that failed, without those with an error."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [t for t in trajectories if t.error is None and not t.success]


@dataclass(frozen=True)
class NoEpisode:
    """`DistillationFilter` that selects no episode: distillation does not change the bank."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return ()


@dataclass(frozen=True)
class CompactDistilPrompt:
    """`PromptWriter` for tiny extractors.

    The prompt holds the goal, the experience that guided the episode, its digest and its outcome.

    Raise `RolloutError` if the episode has no digest.
    """

    digests: Mapping[str, Digest]
    """Digest function by task name."""

    def __call__(self, request: DistilRequest) -> Sequence[Segment]:
        hints = [f"hint {number} {hit.text}" for number, hit in enumerate(request.shown, start=1)]
        outcome = "success" if request.success else "failure"
        name = request.task.name
        try:
            digest = self.digests[name](request.segments)
        except ValueError as error:
            raise RolloutError("prompt", f"{name} did not write this episode: {error}") from error
        lines = [request.task.goal, *hints, digest, outcome]
        return [Segment("user", "\n".join(lines), "task")]


@dataclass(frozen=True)
class FullDistilPrompt:
    """`PromptWriter` for language models: it fills the prompt `distil`.

    The prompt is one user message, because some chat templates support no system message. If it is
    too long, the middle of the transcript is left out. Text from the episode is indented, so that
    it cannot be mistaken for a line of the prompt. The agent's thinking is included, because it
    explains the actions.

    Raise `RolloutError` if no part of the transcript fits.
    """

    template: str
    """Text of the prompt `distil`."""
    renderer: ChatRenderer
    """Renderer of the model that writes the bank."""
    max_tokens: int
    """Maximum number of tokens of the rendered prompt.

    It is the context of this model minus `extractor.max_response_tokens`.
    """
    vote: str | None = None
    """Text that asks for votes on the experience that guided the episode; None for no votes.

    It is used if the agent read at least one experience in its original words.
    """
    task_slots: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Texts of further slots of the template, by task name."""

    def __call__(self, request: DistilRequest) -> Sequence[Segment]:
        votes = bool(self.vote) and not all(hit.use.reworded for hit in request.shown)
        experiences = [
            f"{number}.{REWORDED_MARK if votes and hit.use.reworded else ''}\n{quoted(hit.text)}"
            for number, hit in enumerate(request.shown, start=1)
        ]
        slots = {
            "goal": quoted(request.task.goal),
            "outcome": _outcome(request),
            "experiences": "\n".join(experiences) or "None.",
            **self.task_slots.get(request.task.name, {}),
        }
        template = f"{self.template}\n\n{self.vote}" if votes else self.template
        return with_transcript(template, slots, request.segments, self.renderer, self.max_tokens)


def _outcome(request: DistilRequest) -> str:
    if request.success:
        return "success"
    return "failure: the episode was cut off before it ended" if request.truncated else "failure"


def _transcript(segments: Sequence[Segment]) -> Iterator[str]:
    """Yield label and quoted text of every segment that belongs to a transcript.

    Turn 0 is everything before the agent's first reply. Turn n begins with the n-th reply.
    """
    turn = 0
    for segment in segments:
        turn += segment.origin == "policy"
        if segment.origin in SPEAKERS:
            yield f"[turn {turn}, {SPEAKERS[segment.origin]}]\n{quoted(segment.text)}"


def with_transcript(
    template: str,
    slots: Mapping[str, str],
    segments: Sequence[Segment],
    renderer: ChatRenderer,
    max_tokens: int,
) -> list[Segment]:
    """Return the prompt with the transcript of `segments` in its slot.

    If the prompt would be longer than `max_tokens`, the middle of the transcript is left out.
    `slots`: texts of the other slots.

    Raise `RolloutError` if no part of the transcript fits.
    """

    def write_prompt(transcript: str) -> list[Segment]:
        return [Segment("user", fill(template, **slots, transcript=transcript), "task")]

    def length(prompt: Sequence[Segment]) -> int:
        return len(renderer.encode(renderer.text(prompt)))

    transcript = "\n".join(_transcript(segments))
    prompt = write_prompt(transcript)
    if len(renderer.text(prompt).encode()) < max_tokens:
        # A prompt has no more tokens than bytes. Counting the tokens takes milliseconds.
        return prompt
    tokens, size = length(prompt), len(transcript)
    other_tokens = length(write_prompt("")) if tokens > max_tokens else 0
    while tokens > max_tokens:
        size = (
            int(0.95 * size * (max_tokens - other_tokens) / (tokens - other_tokens))
            if tokens > other_tokens
            else 0
        )
        if size < 1:
            raise RolloutError(
                "prompt",
                f"the prompt without the transcript has {other_tokens} tokens; with a limit of "
                f"{max_tokens} tokens, no part of the transcript fits",
            )
        prompt = write_prompt(_without_middle(transcript, size))
        tokens = length(prompt)
    return prompt


def quoted(text: str) -> str:
    """Return the text as prompts quote it: every line is indented."""
    return "\n".join(INDENT + line for line in text.splitlines()) or f"{INDENT}(nothing)"


def _without_middle(text: str, size: int) -> str:
    """Return the first and the last `size` // 2 characters, and a note on the omitted ones."""
    head, tail = text[: size // 2], text[len(text) - size // 2 :]
    return (
        f"{head}\n[… {len(text) - len(head) - len(tail)} characters are left out …]\n{INDENT}{tail}"
    )
