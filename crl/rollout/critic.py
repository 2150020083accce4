"""Actor-critic (CRL appendix B.1): the actor judges an experience before it guides an episode.

The actor accepts the experience, refines it in other words, or rejects it. Its prompt holds the
goal and the actor's success rate there without experience. Members of a group with the same
experience share one verdict: the first member requests it, the others wait. Critiques are not
trained on.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, get_args

from crl.envs.actions import tagged_answers
from crl.errors import RolloutError
from crl.manager import OpLimits
from crl.modeling.thinking import answer_start, opened_thinking
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Hit
from crl.rollout.decoding import Decoding
from crl.rollout.episode import EpisodeKey
from crl.rollout.rates import SuccessRates
from crl.rollout.waves import Sampler
from crl.types import Completion, Segment, Task, Verdict

CriticPromptWriter = Callable[[Task, Hit, float | None], Sequence[Segment]]
"""Function that writes the actor's prompt.

Arguments: the task, the experience, and the actor's success rate in [0, 1] without experience, None
if unknown.
"""

MAX_CHARS = OpLimits().max_chars
"""Maximal characters of a refined experience; the same limit as for the extractor's experiences."""

MAX_TIMES = 4096
"""Maximum number of stored critique times between two calls of `Critic.take_metrics`."""

_VERDICT = re.compile(
    r"\W*(?:\w+\s*:\W*)?(accept|refine|reject)(?:e?d)?\b[\s:*]*(.*)", re.IGNORECASE | re.DOTALL
)
_ANY_VERDICT = re.compile(r"\b(accept|refine|reject)", re.IGNORECASE)
_PUNCTUATION = " \t\r\n.,;:!?\"'`*"


@dataclass(frozen=True, slots=True)
class Critique:
    """Parsed judgement of an experience."""

    verdict: Verdict
    text: str = ""
    """Text of a refinement."""
    malformed: bool = False
    """True if no verdict could be read; the verdict is then accept."""

    def apply_to(self, hit: Hit) -> Hit:
        """Return `hit` with this verdict and, after refine, with the refined text."""
        text = self.text if self.verdict == "refine" else hit.text
        return replace(hit, text=text, use=replace(hit.use, verdict=self.verdict))


MALFORMED = Critique("accept", malformed=True)


def parse_critique(completion: str, *, thinking: bool = False) -> Critique:
    """Return the critique in a completion.

    A critique is `accept`, `reject`, or `refine` followed by the better text, optionally after a
    colon. Only the text after the thinking is read; `thinking` says that the prompt opened the
    thinking. Of this text, the last `<answer>…</answer>` with a verdict counts. Without any tag,
    the last line counts, or the whole text if the last line holds no verdict. Text after accept or
    reject is a reason and is ignored. A refinement that is empty or longer than MAX_CHARS
    characters is malformed.
    """
    start = answer_start(completion, thinking=thinking)
    if start is None:
        return MALFORMED  # the completion ended during the thinking
    answer = completion[start:]
    tagged = tagged_answers(answer)
    parts = (
        list(reversed(tagged))
        if tagged is not None
        else [*answer.strip().splitlines()[-1:], answer]
    )
    return next((critique for critique in map(_parse_text, parts) if critique), MALFORMED)


def read_critique(completion: Completion, renderer: ChatRenderer, prompt: str) -> Critique:
    """Return the critique in a completion of the prompt with the text `prompt`.

    A refinement that the token limit cut off is malformed.
    """
    truncated = completion.finish == "length"
    answer = renderer.decode(completion.ids if truncated else completion.ids[:-1])
    critique = parse_critique(answer, thinking=bool(opened_thinking(prompt)))
    return MALFORMED if truncated and critique.verdict == "refine" else critique


def _parse_text(text: str) -> Critique | None:
    match = _VERDICT.fullmatch(text)
    if not match:
        return None
    verdict, rest = match[1].lower(), match[2].strip()
    if verdict == "refine":
        return (
            Critique("refine", rest)
            if rest.strip(_PUNCTUATION) and len(rest) <= MAX_CHARS
            else None
        )
    if _ANY_VERDICT.search(rest):
        return None  # two verdicts contradict each other
    return Critique("accept" if verdict == "accept" else "reject")


class SharedVerdict:
    """Verdict that several episodes may await. A separate sampler session requests it.

    An episode that waits leaves the sampler. It joins again before the request's session leaves. In
    deterministic mode, therefore, no wave waits for these episodes, no wave is released without
    them, and the time of their arrival does not matter. The cancellation of one episode does not
    cancel the verdict for the others.
    """

    def __init__(
        self, sampler: Sampler, session: str, request: Coroutine[Any, Any, Critique]
    ) -> None:
        self._sampler, self._session = sampler, session
        self._waiting: set[str] = set()
        sampler.join(session)
        self._request = asyncio.create_task(request, name=session)
        # This callback is the first one. It runs before waiting episodes wake up.
        self._request.add_done_callback(self._request_done)

    def close(self) -> None:
        """Cancel the request: no episode needs the verdict any more."""
        self._request.cancel()

    async def verdict(self, session: str) -> Critique:
        """Return the verdict, or raise the exception of the request.

        `session`: the session of the episode that waits.
        """
        if not self._request.done():
            self._waiting.add(session)
            self._sampler.leave(session)
        try:
            return await asyncio.shield(self._request)
        finally:
            self._waiting.discard(session)

    def _request_done(self, request: asyncio.Task[Critique]) -> None:
        for session in self._waiting:
            self._sampler.join(session)
        self._sampler.leave(self._session)


@dataclass
class _Group:
    """State of a group with guided members."""

    members: set[int] = field(default_factory=set)
    """Members that have not left yet."""
    verdicts: dict[tuple[str, int], SharedVerdict] = field(default_factory=dict)
    """Verdicts by uid and version of the experience."""


class Critic:
    """`Judge` that asks the actor.

    An experience that the agent itself asked for is always accepted.
    """

    verdict_on_asked: Verdict | None = "accept"

    def __init__(
        self, decoding: Decoding, prompt: CriticPromptWriter, rates: SuccessRates,
        max_response_tokens: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Prepare critiques.

        * `decoding`: that of the episodes. A random draw depends on group and experience, not on
          the member that requests the critique.
        * `prompt`: writer of the actor's prompt.
        * `rates`: the actor's success rates without experience.
        * `max_response_tokens`: tokens of one critique, thinking and stop token included, by task
          name.
        """
        self._decoding, self._prompt, self._rates = decoding, prompt, rates
        self._max_response_tokens = max_response_tokens
        self._groups: dict[str, _Group] = {}
        self._counts: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=MAX_TIMES)

    def join(self, key: EpisodeKey) -> None:
        self._groups.setdefault(key.group_session, _Group()).members.add(key.member)

    def leave(self, key: EpisodeKey) -> None:
        """Remove a member. When the last member leaves, cancel the group's open requests."""
        if group := self._groups.get(key.group_session):
            group.members.discard(key.member)
            if not group.members:
                for shared_verdict in self._groups.pop(key.group_session).verdicts.values():
                    shared_verdict.close()

    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        """Return `hit` with the actor's verdict.

        If the engine cannot serve the request, the critique is malformed and accepts.
        """
        verdicts = self._groups.setdefault(key.group_session, _Group()).verdicts
        unit = hit.use.uid, hit.use.version
        if unit not in verdicts:
            session = f"{key.group_session}/critic/{hit.use.uid}@{hit.use.version}"
            verdicts[unit] = SharedVerdict(
                self._decoding.sampler, session, self._critique(session, task, hit)
            )
        return (await verdicts[unit].verdict(key.session)).apply_to(hit)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the critiques since the last call; empty without any.

        The metrics are the number of critiques, the share of each verdict, the share of malformed
        critiques (which are also counted as accepted), the sampled tokens, and the median time in
        milliseconds.
        """
        if not self._seconds:
            return {}
        critiques = self._counts["critiques"]
        shares = {
            f"critic/{name}": self._counts[name] / critiques
            for name in (*get_args(Verdict), "malformed")
        }
        metrics = {
            "critic/critiques": critiques,
            **shares,
            "critic/sampled_tokens": self._counts["sampled_tokens"],
            "perf/critic_p50_ms": 1000 * median(self._seconds),
        }
        self._counts.clear()
        self._seconds.clear()
        return metrics

    async def _critique(self, session: str, task: Task, hit: Hit) -> Critique:
        start = time.perf_counter()
        try:
            critique = await self._sample_critique(session, task, hit)
        except RolloutError:
            critique = MALFORMED
        self._seconds.append(time.perf_counter() - start)
        self._counts.update(
            ["critiques", critique.verdict, *(["malformed"] if critique.malformed else [])]
        )
        return critique

    async def _sample_critique(self, session: str, task: Task, hit: Hit) -> Critique:
        renderer = self._decoding.renderer
        text = renderer.text(self._prompt(task, hit, self._rates.rate(task)))
        completion = await self._decoding.complete(
            renderer.encode(text),
            self._max_response_tokens[task.name],
            session=session,
            draw=("critic", session),
        )
        if completion is None:
            return MALFORMED
        self._counts["sampled_tokens"] += len(completion.ids)
        return read_critique(completion, renderer, text)
