"""Distillation of a finished episode into operations.

The extractor is prompted, its answer is parsed, and the written texts are embedded. The bank is not
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from crl.manager.distillation.departure import target_span
from crl.manager.distillation.extractor import Answer, Extractor
from crl.manager.distillation.ops import Op, ParsedOps, parse_note, parse_ops
from crl.manager.distillation.schemas import distil_schema
from crl.manager.keys import KeyEmbedder
from crl.manager.records import Distilled, DistilRequest, UnitKey, Vote, Write
from crl.types import ExperienceUse, Segment

PromptWriter = Callable[[DistilRequest], Sequence[Segment]]
"""Function that writes the extractor's prompt. It numbers `request.shown` from 1, in order.

It raises `RolloutError` if no prompt is possible.
"""


NoteReader = Callable[[DistilRequest, str], tuple[str, str]]
"""Function from an answer about an episode to the text of a note and the reason for refusal.

The answer has no thinking. The reason is empty for a usable answer.
"""


class Distiller:
    """Distiller of episodes.

    * `prompt`: writer of the extractor's prompt for an episode.
    * `votes`: True if the prompt also asks for votes.
    * `notes`: True if the answer is the text of one experience, not a list of operations.
    * `read_note`: reader of a note; None: the whole answer is the text.
    * `guidance`: False if the prompt has none of the experiences that guided the episode.
    """

    def __init__(
        self, extractor: Extractor, keys: KeyEmbedder, prompt: PromptWriter, *, votes: bool,
        notes: bool = False, read_note: NoteReader | None = None, guidance: bool = True,
    ) -> None:  # fmt: skip
        self._extractor, self._keys, self._prompt = extractor, keys, prompt
        self._votes, self._notes, self._read_note = votes, notes, read_note
        self._guidance = guidance

    async def distil(self, request: DistilRequest) -> Distilled:
        """Ask the extractor about an episode and return the result.

        Raise `RolloutError` if the request cannot be distilled, `TransientError` if a retry may
        succeed, and `EngineError` if the engine has failed.
        """
        if not self._guidance:
            request = replace(request, shown=())

        def parse(completion: str, thinking: bool) -> ParsedOps:
            if self._notes:
                read = partial(self._read_note, request) if self._read_note else None
                return parse_note(completion, thinking=thinking, read=read)
            parsed = parse_ops(completion, len(request.shown), thinking=thinking, votes=self._votes)
            return _one_op_per_experience(completion, parsed, [hit.use for hit in request.shown])

        segments = await self._extractor.run_blocking(partial(self._prompt, request))
        votable = [i for i, hit in enumerate(request.shown, start=1) if not hit.use.reworded]
        schema = distil_schema(len(request.shown), votable=votable if self._votes else ())
        answer = await self._extractor.answer("distil", request.id, segments, parse, schema)
        writes, votes = await self._writes(request, answer), tuple(_votes(request, answer))
        returns = sum(op.kind == "return" for op in answer.ops)
        return Distilled(request, answer.generation, writes, returns, answer.dropped, votes)

    async def _writes(self, request: DistilRequest, answer: Answer) -> tuple[Write, ...]:
        writing_ops = [(i, op) for i, op in enumerate(answer.ops) if op.kind in ("add", "update")]
        key = self._keys.state
        state = key.of_last_action(request.segments) if key else None
        keys = [(request.task.goal, state or op.text) for _, op in writing_ops]
        vectors = await self._keys.embed(keys)
        return tuple(
            Write(i, op.text, answer.spans[i], vector, _targets(request, op))
            for (i, op), vector in zip(writing_ops, vectors, strict=True)
        )


def _one_op_per_experience(
    completion: str, parsed: ParsedOps, uses: Sequence[ExperienceUse]
) -> ParsedOps:
    """Keep at most one update or vote per experience and refuse the others.

    The first update of an experience is kept, even if the experience has several numbers in the
    prompt. Without an update, the first vote is kept. A vote beside an update is refused because
    the new version starts without votes. A vote is also refused if the agent read a text that
    differs from the entry's.
    """
    used_targets: set[UnitKey] = set()
    refused: dict[Op, str] = {}
    for op in sorted(parsed.ops, key=lambda op: op.is_vote):  # updates first
        for use in (uses[target] for target in op.targets):
            if op.is_vote and use.reworded:
                refused[op] = "vote on other words"
            elif _source_unit(use) in used_targets:
                refused[op] = "target named before"
            else:
                used_targets.add(_source_unit(use))
    ops = tuple(op for op in parsed.ops if op not in refused)
    head_chars = parsed.head_chars
    ends_cleanly = parsed.ends_cleanly and not (refused and parsed.ops[-1] in refused)
    if parsed.ops and not ops:
        first = parsed.ops[0].span
        target = target_span(completion, first)
        head_chars = (target or first)[1] - 1
    dropped = Counter(parsed.dropped) + Counter(refused.values())
    return replace(
        parsed, ops=ops, dropped=dropped, head_chars=head_chars, ends_cleanly=ends_cleanly
    )


def _votes(request: DistilRequest, answer: Answer) -> Iterable[Vote]:
    for i, op in enumerate(answer.ops):
        if op.is_vote:
            (unit,) = _targets(request, op)
            yield Vote(i, unit, 1 if op.kind == "up" else -1)


def _targets(request: DistilRequest, op: Op) -> tuple[UnitKey, ...]:
    return tuple(_source_unit(request.shown[target].use) for target in op.targets)


def _source_unit(use: ExperienceUse) -> UnitKey:
    return UnitKey(use.uid, use.version)
