"""Actor-critic (CRL appendix B.1): before a guided episode the actor itself judges the experience that was found for it.

It accepts the experience, refines it in its own words, or rejects it, in the light of the goal and of how often it succeeds there
without one. The members of a group that were given one experience have one verdict: the first of them asks, the others wait. What the
actor says here is not trained on.
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
from crl.manager.ops import THINKING_ENDS, THINKING_OPENS
from crl.protocols import Hit
from crl.rollout.episode import EpisodeKey
from crl.rollout.rates import SuccessRates
from crl.rollout.waves import Sampler
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Sampling, Segment, Task, Verdict

CriticPromptWriter = Callable[[Task, Hit, float | None], Sequence[Segment]]
"""What the actor is told: the task, the experience, and its success rate in [0, 1] without experience, None where it is not known."""

MAX_CHARS = OpLimits().max_chars
"""Characters of a refined experience, as of one that the extractor writes."""

TIMES = 4096
"""Times of critiques that are kept for whoever takes them."""

_VERDICT = re.compile(
    r"\W*(?:\w+\s*:\W*)?(accept|refine|reject)(?:e?d)?\b[\s:*]*(.*)", re.IGNORECASE | re.DOTALL
)
_VERDICTS = re.compile(r"\b(accept|refine|reject)", re.IGNORECASE)
_AROUND = " \t\r\n.,;:!?\"'`*"


@dataclass(frozen=True, slots=True)
class Critique:
    """text: of a refinement; malformed: no verdict could be read, which accepts."""

    verdict: Verdict
    text: str = ""
    malformed: bool = False

    def applied(self, hit: Hit) -> Hit:
        """The hit as it stands after this verdict."""
        text = self.text if self.verdict == "refine" else hit.text
        return replace(hit, text=text, use=replace(hit.use, verdict=self.verdict))


MALFORMED = Critique("accept", malformed=True)


def parse_critique(completion: str, *, thinking: bool = False) -> Critique:
    """What a completion says: `accept`, `reject`, or `refine` and then, perhaps after a colon, the better text.

    Only what follows the thinking counts (thinking: the prompt opened it); of that the last `<answer>…</answer>` with a verdict, and
    without any tag its last line, or all of it. What follows accept or reject is a reason. A refinement that says nothing, or has more
    than MAX_CHARS characters, is malformed.
    """
    _, ended, answer = completion.rpartition(THINKING_ENDS)
    if not ended and (thinking or THINKING_OPENS in completion):
        return MALFORMED  # cut off in thought
    tagged = tagged_answers(answer)
    places = (
        list(reversed(tagged))
        if tagged is not None
        else [*answer.strip().splitlines()[-1:], answer]
    )
    return next((critique for critique in map(_critique, places) if critique), MALFORMED)


def _critique(text: str) -> Critique | None:
    match = _VERDICT.fullmatch(text)
    if not match:
        return None
    verdict, rest = match[1].lower(), match[2].strip()
    if verdict == "refine":
        return Critique("refine", rest) if rest.strip(_AROUND) and len(rest) <= MAX_CHARS else None
    if _VERDICTS.search(rest):
        return None  # of two verdicts, neither
    return Critique("accept" if verdict == "accept" else "reject")


class Case:
    """A verdict that several episodes may wait for, reached in a session of its own at the sampler.

    Who waits has left the sampler meanwhile, and is back before the case's session leaves: so in deterministic mode no wave waits for
    those who wait, none goes without them, and it does not matter when each of them came. An episode that is cancelled takes the
    verdict from nobody.
    """

    def __init__(
        self, sampler: Sampler, session: str, asking: Coroutine[Any, Any, Critique]
    ) -> None:
        self._sampler, self._session = sampler, session
        self._waiting: set[str] = set()
        sampler.join(session)
        self._asking = asyncio.create_task(asking, name=session)
        self._asking.add_done_callback(
            self._over
        )  # the first callback: before anyone who waits is woken

    def close(self) -> None:
        """Nobody will want the verdict any more."""
        self._asking.cancel()

    async def verdict(self, session: str) -> Critique:
        """Raises what the asking raised."""
        if not self._asking.done():
            self._waiting.add(session)
            self._sampler.leave(session)
        try:
            return await asyncio.shield(self._asking)
        finally:
            self._waiting.discard(session)

    def _over(self, asking: asyncio.Task[Critique]) -> None:
        for session in self._waiting:
            self._sampler.join(session)
        self._sampler.leave(self._session)


@dataclass
class _Group:
    """The members that have not left yet, and the cases of what they were given, by use."""

    members: set[int] = field(default_factory=set)
    cases: dict[tuple[str, int], Case] = field(default_factory=dict)


class Critic:
    """`Judge` by the actor.

    prompt: what it is told; rates: of its success without experience; max_response_tokens: of one critique, thinking and stop token
    included, by task name; max_context: tokens of prompt and critique together; seed: the root of its draws, which depend on group and
    experience and not on the member that asks. Sampler and temperature are those of the episodes. What an agent asks for it accepts.
    """

    of_asked: Verdict | None = "accept"

    def __init__(
        self, sampler: Sampler, renderer: ChatRenderer, prompt: CriticPromptWriter, rates: SuccessRates,
        max_response_tokens: Mapping[str, int], *, max_context: int, temperature: float, seed: int,
    ) -> None:  # fmt: skip
        self._sampler, self._renderer, self._prompt, self._rates = sampler, renderer, prompt, rates
        self._max_response_tokens, self._max_context = max_response_tokens, max_context
        self._temperature, self._seed = temperature, seed
        self._groups: dict[str, _Group] = {}
        self._counts: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=TIMES)

    def join(self, key: EpisodeKey) -> None:
        self._groups.setdefault(key.group_session, _Group()).members.add(key.member)

    def leave(self, key: EpisodeKey) -> None:
        """The cases of a group are closed and forgotten when its last member leaves."""
        if group := self._groups.get(key.group_session):
            group.members.discard(key.member)
            if not group.members:
                for case in self._groups.pop(key.group_session).cases.values():
                    case.close()

    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        """A critique that the engine could not serve is as one that could not be read: the experience is accepted."""
        cases = self._groups.setdefault(key.group_session, _Group()).cases
        unit = hit.use.uid, hit.use.version
        if unit not in cases:
            session = f"{key.group_session}/critic/{hit.use.uid}@{hit.use.version}"
            cases[unit] = Case(self._sampler, session, self._ask(session, task, hit))
        return (await cases[unit].verdict(key.session)).applied(hit)

    def take(self) -> dict[str, float]:
        """Figures of the critiques since the last call: how many, the share of each verdict, the share of malformed ones (which are among
        the accepted), the tokens sampled for them, the median time of one; empty without any."""
        if not self._seconds:
            return {}
        critiques = self._counts["critiques"]
        shares = {
            f"critic/{name}": self._counts[name] / critiques
            for name in (*get_args(Verdict), "malformed")
        }
        figures = {
            "critic/critiques": critiques,
            **shares,
            "critic/sampled_tokens": self._counts["sampled_tokens"],
            "perf/critic_p50_ms": 1000 * median(self._seconds),
        }
        self._counts.clear()
        self._seconds.clear()
        return figures

    async def _ask(self, session: str, task: Task, hit: Hit) -> Critique:
        begin = time.perf_counter()
        try:
            critique = await self._answer(session, task, hit)
        except RolloutError:
            critique = MALFORMED
        self._seconds.append(time.perf_counter() - begin)
        self._counts.update(
            ["critiques", critique.verdict, *(["malformed"] if critique.malformed else [])]
        )
        return critique

    async def _answer(self, session: str, task: Task, hit: Hit) -> Critique:
        text = self._renderer.text(self._prompt(task, hit, self._rates.rate(task)))
        prompt = self._renderer.encode(text)
        room = self._max_context - len(prompt)
        if room < 1:
            return MALFORMED
        sampling = Sampling(
            min(self._max_response_tokens[task.name], room),
            self._renderer.stop_ids,
            self._temperature,
        )
        draw = derive_seed(self._seed, "critic", session)
        completion = await self._sampler.generate(prompt, sampling, session=session, rng=draw)
        self._counts["sampled_tokens"] += len(completion.ids)
        cut = completion.finish == "length"
        said = self._renderer.decode(completion.ids if cut else completion.ids[:-1])
        critique = parse_critique(said, thinking=text.rstrip().endswith(THINKING_OPENS))
        return MALFORMED if cut and critique.verdict == "refine" else critique
