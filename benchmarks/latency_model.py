"""Engine that only takes the time of a 7B model, and a game for it.

The engine computes nothing, so measurements show the cost of the orchestrator. Time is real and not
scaled. The rates are those of eight A100 that serve one 7B model in bfloat16 with vLLM, one copy
per GPU:

* 75 tokens/s of a single request: measured for Llama-3.1-8B, 77 % of the limit by memory bandwidth
  (johnmusgrave.com/p/vllm-throughput-latency-sweep-on);
* 3,363 tokens/s per GPU: measured for DeepSeek-R1-Distill-Qwen-7B (morphllm.com/vllm-benchmarks);
* 10,000 prompt tokens/s per GPU: half of its 312 TFLOP/s at 2 · 7.6e9 FLOP per token.

Answers are shorter than those of a thinking model, and episodes have fewer turns. Both increase the
load of the orchestrator per second.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

from crl.modeling.tokens import ChatRenderer
from crl.protocols import Environment, PublishHandle
from crl.types import Completion, Observation, Sampling, StepResult, Task

GPUS = 8
REQUEST_RATE, TOTAL_RATE, PREFILL_RATE = 75.0, 3_363.0 * GPUS, 10_000.0 * GPUS
"""Tokens per second: decoded per request at most, decoded in total, prompt tokens in total."""
BLOCK_TOKENS = 16
"""Tokens of a block in the prefix cache, as in vLLM."""
TICK_S = 0.01
"""Seconds between two updates of the requests, about the duration of a decode step."""
LENGTH_SIGMA = 0.5
"""Standard deviation σ of the logarithm of answer lengths."""
THOUGHT = (
    "the wall lies to the north, the exit may be to the south or to the east, "
    "so it is best to walk on and to look again; "
)

Request = tuple[float, int, asyncio.Future[None]]
"""Value of `_decoded_tokens` at which the request ends, its number for ties, and its future."""


class LatencyModel:
    """`crl.protocols.Engine` that models continuous batching.

    Prompts are read one after the other, without the tokens that are in the prefix cache. Cached
    are all tokens of a session's last turn and, for a new session, the blocks that an earlier first
    prompt begins with. After that all requests decode at the same speed,
    min(REQUEST_RATE, TOTAL_RATE / running).

    An answer is a thought followed by one of `answers(session)`. The answer and its length are
    drawn from the request's `rng`. Lengths are log-normal with median `median` tokens.
    """

    def __init__(
        self, renderer: ChatRenderer, answers: Callable[[str], Sequence[str]], *, median: int
    ) -> None:
        self.version, self.busy_s = 0, 0.0
        self._answers = answers
        self._encoded = cache(lambda answer: renderer.encode(f"</think>\n{answer}"))
        self._thought = renderer.encode("<think>\n" + THOUGHT * median)
        self._median = median
        self._session_tokens: dict[str, int] = {}
        self._cached_blocks: set[int] = set()
        # tokens to read, tokens to decode, future of the request
        self._prefill_queue: deque[tuple[int, int, asyncio.Future[None]]] = deque()
        self._decoding: list[Request] = []
        # Tokens that a request would have decoded since the start of the engine. A request that
        # starts at r ends at r + its length.
        self._decoded_tokens = 0.0
        self._prefill_budget = 0.0  # prompt tokens that the elapsed time allows to read
        self._request_numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        generator = random.Random(rng)
        answer = self._encoded(generator.choice(self._answers(session or "")))
        length = max(
            len(answer), round(generator.lognormvariate(math.log(self._median), LENGTH_SIGMA))
        )
        answer_ids = (*self._thought[: length - len(answer)], *answer, sampling.stop_ids[0])[
            : sampling.max_tokens
        ]
        cached = self._session_tokens.get(session or "", 0)
        if not 0 < cached < len(ids):  # a shorter prompt starts a new conversation
            cached = self._cached_prefix(ids)
        await self._serve(len(ids) - cached, len(answer_ids))
        if session:
            self._session_tokens[session] = len(ids) + len(answer_ids)
        finish = "stop" if answer_ids[-1] in sampling.stop_ids else "length"
        return Completion(
            answer_ids, (-1.0,) * len(answer_ids), (self.version,) * len(answer_ids), finish
        )

    def clear_cache(self) -> None:
        """Clear the prefix cache, as after an update of the weights."""
        self._session_tokens.clear()
        self._cached_blocks.clear()

    def _cached_prefix(self, ids: Sequence[int]) -> int:
        """Return the number of tokens of a first prompt that are in the prefix cache.

        Only whole blocks count. The last token is always read and never counts.
        """
        prefix, cached = 0, 0
        for end in range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS):
            prefix = hash((prefix, tuple(ids[end - BLOCK_TOKENS : end])))
            if prefix in self._cached_blocks:
                cached = end
            self._cached_blocks.add(prefix)
        return cached

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        return [-1.0] * (len(ids) - 1)

    async def update_weights(self, handle: PublishHandle) -> None:
        self.version = handle.version
        self.clear_cache()

    async def health(self) -> None:
        """Do nothing: a clock cannot fail."""

    def details(self) -> list[str]:
        return []

    async def aclose(self) -> None:
        if self._timer:
            self._timer.cancel()

    async def _serve(self, prompt: int, answer: int) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._prefill_queue.append((prompt, answer, done))
        if self._timer is None:
            self._last_tick = time.perf_counter()
            self._timer = loop.call_later(TICK_S, self._advance)
        try:
            await done
        except asyncio.CancelledError:
            self._cancel(done)
            raise

    def _cancel(self, done: asyncio.Future[None]) -> None:
        """Remove a cancelled request. The other requests then get its share of time."""
        if self._prefill_queue and self._prefill_queue[0][2] is done:
            self._prefill_budget = 0.0  # the request was being read
        self._prefill_queue = deque(
            request for request in self._prefill_queue if request[2] is not done
        )
        self._decoding = [request for request in self._decoding if request[2] is not done]
        heapq.heapify(self._decoding)

    def _advance(self) -> None:
        """Advance all requests. One timer serves all, because a timer for each would be a load."""
        now = time.perf_counter()
        seconds, self._last_tick = now - self._last_tick, now
        self.busy_s += seconds
        if self._decoding:
            self._decoded_tokens += min(REQUEST_RATE, TOTAL_RATE / len(self._decoding)) * seconds
        while self._decoding and self._decoding[0][0] <= self._decoded_tokens:
            _, _, done = heapq.heappop(self._decoding)
            if not done.done():
                done.set_result(None)
        self._prefill_budget = (
            self._prefill_budget + PREFILL_RATE * seconds if self._prefill_queue else 0.0
        )
        while self._prefill_queue and self._prefill_queue[0][0] <= self._prefill_budget:
            prompt, answer, done = self._prefill_queue.popleft()
            self._prefill_budget -= prompt
            heapq.heappush(
                self._decoding, (self._decoded_tokens + answer, next(self._request_numbers), done)
            )
        running = self._prefill_queue or self._decoding
        self._timer = (
            asyncio.get_running_loop().call_later(TICK_S, self._advance) if running else None
        )


# ── the game ──────────────────────────────────────────────────────────────────────────────────────


SIZE = 9
MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
LEGEND = (
    "@ is you, > is the exit, . is the floor; what is further than two steps away lies in the dark."
)


class Walk:
    """`crl.protocols.Environment`: a dark square with an exit. Every call returns immediately."""

    async def reset(self, task: Task) -> Observation:
        rng = random.Random(task.seed)
        self._position, self._exit = (
            (SIZE // 2, SIZE // 2),
            (rng.randrange(SIZE), rng.randrange(SIZE)),
        )
        return Observation(self._view())

    async def step(self, text: str) -> StepResult:
        if text not in MOVES:
            return StepResult("Answer with north, south, east or west.", valid=False)
        self._position = (
            self._clamp(self._position[0] + MOVES[text][0]),
            self._clamp(self._position[1] + MOVES[text][1]),
        )
        won = self._position == self._exit
        return StepResult(self._view(), reward=float(won), done=won, success=won)

    async def aclose(self) -> None: ...

    def _clamp(self, coordinate: int) -> int:
        return min(max(coordinate, 0), SIZE - 1)

    def _view(self) -> str:
        (x, y), (exit_x, exit_y) = self._position, self._exit
        columns, rows = slice(max(x - 2, 0), x + 3), slice(max(y - 2, 0), y + 3)
        cells = [[" "] * SIZE for _ in range(SIZE)]
        for row in cells[rows]:
            row[columns] = "." * len(row[columns])
        if cells[exit_y][exit_x] == ".":
            cells[exit_y][exit_x] = ">"
        cells[y][x] = "@"
        return "\n".join([*map("".join, cells), LEGEND, f"You stand at {x} {y}."])


class Walks:
    """`crl.protocols.EnvironmentPool` that creates a new environment for every episode."""

    async def acquire(self, task: Task) -> Environment:
        return Walk()

    async def release(self, environment: Environment) -> None: ...
    async def aclose(self) -> None: ...
