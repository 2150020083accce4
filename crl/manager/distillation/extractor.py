"""Client of the extractor: prompts in, parsed operations and generations for training out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from crl.config.schema import ExtractorSection
from crl.errors import RolloutError
from crl.manager.distillation.ops import Op, ParsedOps, Span, token_spans
from crl.manager.distillation.schemas import Schema
from crl.manager.records import Generation
from crl.modeling.thinking import answer_start, opened_thinking
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Engine
from crl.seeds import derive_seed
from crl.types import Completion, Sampling, Segment

T = TypeVar("T")

Parser = Callable[[str, bool], ParsedOps]
"""Function that parses a completion.

The second argument says whether the prompt opened the thinking.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """Parsed answer of the extractor."""

    generation: Generation
    ops: tuple[Op, ...]
    """Usable ops, in order."""
    spans: tuple[Span, ...]
    """Tokens [start, stop) of each op in the sampled tokens of the generation."""
    dropped: Mapping[str, int]
    """Number of refused ops, by reason."""


class Extractor:
    """Client of the extractor's engine.

    * settings: sampling parameters of the answers.
    * seed: root of the seeds of the draws. The seed of a draw also depends on the purpose and the
      name of the answer, so a repeated request has the same seed.
    * threaded: True if prompts are rendered and answers are parsed on a thread, so that the event
      loop is not blocked.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        settings: ExtractorSection,
        *,
        seed: int,
        threaded: bool,
    ) -> None:
        self.engine = engine
        self._renderer, self._seed, self._threaded = renderer, seed, threaded
        self._blocking_lock = asyncio.Lock()
        self._structured = settings.structured_outputs
        self._sampling = Sampling(
            settings.max_response_tokens,
            renderer.stop_ids,
            settings.temperature,
            settings.top_p,
            settings.top_k,
        )

    def tokens(self, segments: Sequence[Segment]) -> int:
        """Return the number of tokens of the prompt that `segments` form."""
        return len(self._renderer.encode(self._renderer.text(segments)))

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which writes a prompt or parses an answer.

        With `threaded`, `work` runs on a thread, because tokenising a long episode takes
        milliseconds.
        """
        if not self._threaded:
            return work()
        async with (
            self._blocking_lock
        ):  # one at a time: several threads would take the interpreter lock from the event loop
            return await asyncio.to_thread(work)

    async def answer(
        self, purpose: str, name: str, segments: Sequence[Segment], parse: Parser, schema: Schema
    ) -> Answer:
        """Ask the extractor and return its parsed answer.

        `name` becomes the id of the generation and must be unique within the bank. With structured
        outputs, the engine samples only answers that match `schema`. Raise
        `RolloutError` if the engine cannot serve the request, and `EngineError` if it has failed.
        """
        text, prompt = await self.run_blocking(partial(self._render, segments))
        sampling = (
            replace(self._sampling, json_schema=json.dumps(schema))
            if self._structured
            else self._sampling
        )
        completion = await self.engine.generate(
            prompt, sampling, rng=derive_seed(self._seed, purpose, name)
        )
        thinking = bool(opened_thinking(text))
        parsed, head_tokens, spans = await self.run_blocking(
            partial(self._parse, completion, parse, thinking)
        )
        return Answer(
            Generation(name, completion.versions[0], prompt, completion, head_tokens),
            parsed.ops,
            spans,
            parsed.dropped,
        )

    async def text(self, purpose: str, name: str, segments: Sequence[Segment]) -> tuple[str, int]:
        """Return an answer in free text after its thinking, and its number of sampled tokens.

        Raise `RolloutError` if the engine cannot serve the request or if the thinking did not end,
        and `EngineError` if the engine has failed.
        """
        prompt_text, prompt = await self.run_blocking(partial(self._render, segments))
        completion = await self.engine.generate(
            prompt, self._sampling, rng=derive_seed(self._seed, purpose, name)
        )
        ids = completion.ids[:-1] if completion.finish == "stop" else completion.ids
        answer = self._renderer.decode(ids)
        start = answer_start(answer, thinking=bool(opened_thinking(prompt_text)))
        if start is None:
            raise RolloutError("answer", "the thinking did not end")
        return answer[start:].strip(), len(completion.ids)

    def _render(self, segments: Sequence[Segment]) -> tuple[str, tuple[int, ...]]:
        text = self._renderer.text(segments)
        return text, self._renderer.encode(text)

    def _parse(
        self, completion: Completion, parse: Parser, thinking: bool
    ) -> tuple[ParsedOps, int, tuple[Span, ...]]:
        """Return the parsed ops, the number for `Generation.head_tokens`, and each op's tokens.

        The tokens of the last op include the rest of the answer and its stop token, because no
        other sample trains the extractor to end an answer. They are not included if a refused op
        follows or if the answer was cut off at the token limit.
        """
        decode, stopped = self._renderer.decode, completion.finish == "stop"
        sampled = completion.ids[:-1] if stopped else completion.ids
        text = decode(sampled)
        parsed = parse(text, thinking)
        # Computed separately from the ops' spans: the head ends before the first token of the first
        # op, so the two ranges would overlap.
        ((head_tokens, _),) = token_spans(
            decode, sampled, [(parsed.head_chars, parsed.head_chars + 1)]
        )
        # If the head is the whole text, the answer is incomplete. If the token limit cut it off,
        # its last token is punished (`head_tokens` ends before it); otherwise its stop token is.
        if stopped and parsed.head_chars == len(text):
            head_tokens = len(sampled)  # ends before the stop token
        spans = token_spans(decode, sampled, [op.span for op in parsed.ops])
        if stopped and parsed.ends_cleanly and spans:
            spans[-1] = (spans[-1][0], len(completion.ids))
        return parsed, head_tokens, tuple(spans)
