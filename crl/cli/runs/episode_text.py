"""Lines that `crl episodes` and `crl replay` print.

Conversations are text of games and models. Every character that a terminal would interpret is
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.text import Text

from crl.cli.draw import BAD, DIM, GOOD, GUIDED, one_line, printable
from crl.cli.output import table
from crl.types import SAMPLED_ORIGINS, ExperienceUse, Origin, Segment, TokenTrace, Trajectory
from crl.wording import SEGMENT_TITLES, counted

Record = Mapping[str, Any]
"""Episode as JSON, see `crl.records.shards`."""

STYLES: Mapping[Origin, str] = {
    "experience": GUIDED,
    "tool_result": GUIDED,
    "policy": GOOD,
    "tool_call": GOOD,
    "task": DIM,
    "tool_spec": DIM,
}
"""Style of a segment's text, by its origin. Experience stands out."""


def episode_table(records: Sequence[Record], width: int | None) -> list[str]:
    """Return a table of episodes. The task is left out if it is equal in all rows.

    Tokens, turns and rewards are left out, in this order, if the lines are too long.
    """
    columns = {
        "step": [str(r["step"]) for r in records],
        "group": [str(r["group"]) for r in records],
        "member": [str(r["member"]) for r in records],
        "task": [r["task"] for r in records],
        "how": [r["condition"] for r in records],
        "outcome": [outcome(r["success"], r["error"], r["truncated"]) for r in records],
        "reward": [f"{r['reward']:.2f}" for r in records],
        "turns": [str(r["turns"]) for r in records],
        "tokens": [str(r["sampled_tokens"]) for r in records],
        "guided by": [", ".join(_use_name(use) for use in r["used"]) or "–" for r in records],
        "goal": [r["error"] or r["goal"] for r in records],
    }
    if len(set(columns["task"])) == 1:
        del columns["task"]
    return table(columns, width, optional=("tokens", "turns", "reward"))


def outcome(success: bool, error: str | None, truncated: bool) -> str:
    """Return the outcome of an episode in a word or two. An episode that is cut off is lost."""
    if error:
        return "error"
    return "won" if success else "cut off" if truncated else "lost"


def _use_name(use: Mapping[str, Any]) -> str:
    return f"{use['uid']}@{use['version']}"


def replay_lines(
    trajectory: Trajectory, width: int, decode: Callable[[int], str] | None = None
) -> Iterator[Text]:
    """Yield the lines of an episode: facts, then every segment of the conversation in order.

    Rewards stand after the answers of the turns. With `decode`, which returns the text of a token,
    the sampled tokens of every answer follow with their log-probs and policy versions.
    """
    yield from _facts(trajectory)
    answers = _answers(trajectory.traces)
    turn = 0
    for segment in trajectory.segments:
        sampled = segment.origin in SAMPLED_ORIGINS
        title = SEGMENT_TITLES[segment.origin]
        if segment.origin == "policy":
            turn += 1
            # An answer whose turn failed is not counted. A failed episode has no overtime.
            counts = turn <= trajectory.turns or trajectory.error
            title += f" of turn {turn}" if counts else " in overtime"
        yield Text()
        yield Text(f"── {title} ".ljust(min(width, 72), "─"), DIM)
        yield from _text_lines(segment)
        tokens = next(answers, None) if sampled else None
        if tokens and decode:
            yield from _token_lines(tokens, decode)
        if segment.origin == "policy" and turn <= trajectory.turns:
            yield Text(f"reward {trajectory.turn_rewards[turn - 1]:g}", DIM)
    if trajectory.error:
        yield Text()
        yield Text(f"error: {one_line(trajectory.error, len(trajectory.error))}", BAD)
    yield Text()


def _facts(t: Trajectory) -> Iterator[Text]:
    address = t.address
    yield Text(
        f"step {address.step + 1}, group {address.group}, member {address.member}: "
        f"{printable(t.task.name)}, {t.condition}",
        GOOD,
    )
    goal = one_line(t.task.goal, len(t.task.goal))
    yield Text(f"goal    {goal}")
    channels = ", ".join(f"{printable(name)} {value:g}" for name, value in t.rewards.items())
    score = "" if t.outcome.score is None else f", score {t.outcome.score:g}"
    parts = f" ({channels})" if len(t.rewards) > 1 else ""
    yield Text(f"result  {_result(t)}, reward {t.reward:g}{parts}{score}")
    context = sum(trace.mask.count(0) for trace in t.traces)
    samples = f", {context:,} of context in {counted(len(t.traces), 'training sample')}"
    yield Text(f"tokens  {t.activity.sampled_tokens:,} sampled{samples if t.traces else ''}")
    uses = [*t.used, *t.guidance.rejected]
    for use in uses:
        yield Text(
            f"guided by  {_use_text(use)}" if use in t.used else f"rejected  {_use_text(use)}"
        )


def _result(t: Trajectory) -> str:
    """Return the outcome of an episode and its number of turns."""
    turns = counted(t.turns, "turn")
    if t.truncated and not (t.success or t.error):
        return f"lost: cut off after {turns}"
    return f"{outcome(t.success, t.error, t.truncated)} in {turns}"


def _use_text(use: ExperienceUse) -> str:
    how = {
        "start": "retrieved at the start",
        "ask": "retrieved for a question and rewritten",
        "ask_unrefined": "retrieved for a question",
    }[use.how]
    verdict = f", verdict {use.verdict}" if use.verdict else ""
    return f"{printable(use.uid)}@{use.version}, {how}{verdict}"


def _text_lines(segment: Segment) -> Iterator[Text]:
    for line in segment.text.split("\n"):
        yield Text(printable(line.expandtabs(4)), STYLES.get(segment.origin, ""))


Token = tuple[int, float, int]
"""Sampled token: id, log-prob, policy version."""


def _answers(traces: Sequence[TokenTrace]) -> Iterator[list[Token]]:
    """Yield the sampled tokens of every answer, in order. Overtime answers have none."""
    for trace in traces:
        for positions in trace.completions():
            columns = zip(trace.ids, trace.logprobs, trace.versions, strict=True)
            yield list(islice(columns, positions.start, positions.stop))


def _token_lines(tokens: Sequence[Token], decode: Callable[[int], str]) -> Iterator[Text]:
    for token, logprob, version in tokens:
        text = printable(decode(token))
        yield Text(f"  {token:>7}  {logprob:8.4f}  version {version}  {text!r}", DIM)
