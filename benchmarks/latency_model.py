"""An engine that computes nothing and takes as long as a 7 B model would, and a game for it: what is left is the orchestrator.

Real time, and no scale to it. The rates are those of eight A100 that serve one 7 B model in bfloat16 with vLLM, each its own copy:

    75 tokens/s of one request alone      measured for Llama-3.1-8B, 77 % of what the memory's bandwidth allows
                                          (johnmusgrave.com/p/vllm-throughput-latency-sweep-on)
    3,363 tokens/s of one GPU             measured for DeepSeek-R1-Distill-Qwen-7B (morphllm.com/vllm-benchmarks)
    10,000 prompt tokens/s of one GPU     half of its 312 TFLOP/s at 2 · 7.6e9 FLOP a token

Answers are shorter than a thinking model's, and turns fewer: that asks more of the orchestrator in every second.
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

from crl.protocols import Environment, PublishHandle
from crl.tokens import ChatRenderer
from crl.types import Completion, Observation, Sampling, StepResult, Task

GPUS = 8
PER_REQUEST, CAPACITY, PREFILL = 75.0, 3_363.0 * GPUS, 10_000.0 * GPUS
"""Tokens per second: decoded of one request at most, decoded of all together, read of prompts."""
BLOCK = 16
"""Tokens of a prefix that are shared or read together, as in vLLM."""
TICK = 0.01
"""Seconds between two looks at the requests: of the order of a decode step."""
SPREAD = 0.5
"""σ of the lengths' logarithm."""
THOUGHT = "the wall lies to the north, the exit may be to the south or to the east, so it is best to walk on and to look again; "

Request = tuple[float, int, asyncio.Future[None]]
"""Where it ends; its number, which decides ties; who waits."""


class LatencyModel:
    """`crl.protocols.Engine` under continuous batching. Prompts are read one after the other, without what is in the prefix cache: of a
    session what it said and was told, of a new one the blocks that an earlier first prompt begins with too. Then all requests decode at
    the same speed, min(PER_REQUEST, CAPACITY / running).

    An answer is a thought and one of `answers(session)`, drawn from the request's `rng`: so is its length, log-normal about `median`
    tokens.
    """

    def __init__(
        self, renderer: ChatRenderer, answers: Callable[[str], Sequence[str]], *, median: int
    ) -> None:
        self.version, self.busy = 0, 0.0
        self._answers = answers
        self._encoded = cache(lambda answer: renderer.encode(f"</think>\n{answer}"))
        self._thought = renderer.encode("<think>\n" + THOUGHT * median)
        self._median = median
        self._cached: dict[str, int] = {}
        self._blocks: set[int] = set()
        self._read: deque[tuple[int, int, asyncio.Future[None]]] = (
            deque()
        )  # tokens to read, tokens to decode, who waits
        self._decoding: list[Request] = []
        self._reach = 0.0  # tokens that a request decoded which was always there: one that came at r ends at r + its length
        self._paid = 0.0  # prompt tokens for which there was time
        self._numbers = itertools.count()
        self._tick: asyncio.TimerHandle | None = None
        self._then = 0.0

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        draw = random.Random(rng)
        answer = self._encoded(draw.choice(self._answers(session or "")))
        length = max(len(answer), round(draw.lognormvariate(math.log(self._median), SPREAD)))
        sampled = (*self._thought[: length - len(answer)], *answer, sampling.stop_ids[0])[
            : sampling.max_tokens
        ]
        cached = self._cached.get(session or "", 0)
        if not 0 < cached < len(ids):  # a shorter prompt begins anew
            cached = self._shared(ids)
        await self._served(len(ids) - cached, len(sampled))
        if session:
            self._cached[session] = len(ids) + len(sampled)
        finish = "stop" if sampled[-1] in sampling.stop_ids else "length"
        return Completion(sampled, (-1.0,) * len(sampled), (self.version,) * len(sampled), finish)

    def forget(self) -> None:
        """The prefix cache is empty, as after an update of the weights."""
        self._cached.clear()
        self._blocks.clear()

    def _shared(self, ids: Sequence[int]) -> int:
        """Tokens of a first prompt that others begin with as well, in whole blocks, less the last token, which is always read."""
        prefix, shared = 0, 0
        for end in range(BLOCK, len(ids), BLOCK):
            prefix = hash((prefix, tuple(ids[end - BLOCK : end])))
            if prefix in self._blocks:
                shared = end
            self._blocks.add(prefix)
        return shared

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        return [-1.0] * (len(ids) - 1)

    async def update_weights(self, handle: PublishHandle) -> None:
        self.version = handle.version
        self.forget()

    async def health(self) -> None:
        """A clock does not fail."""

    async def aclose(self) -> None:
        if self._tick:
            self._tick.cancel()

    async def _served(self, prompt: int, answer: int) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._read.append((prompt, answer, done))
        if self._tick is None:
            self._then = time.perf_counter()
            self._tick = loop.call_later(TICK, self._advance)
        try:
            await done
        except asyncio.CancelledError:
            self._withdraw(done)
            raise

    def _withdraw(self, done: asyncio.Future[None]) -> None:
        """Of a request that nobody waits for, the others have the time, from now on."""
        if self._read and self._read[0][2] is done:
            self._paid = 0.0  # it was being read
        self._read = deque(one for one in self._read if one[2] is not done)
        self._decoding = [one for one in self._decoding if one[2] is not done]
        heapq.heapify(self._decoding)

    def _advance(self) -> None:
        """One timer for all requests: one for each would be a load of its own."""
        now = time.perf_counter()
        seconds, self._then = now - self._then, now
        self.busy += seconds
        if self._decoding:
            self._reach += min(PER_REQUEST, CAPACITY / len(self._decoding)) * seconds
        while self._decoding and self._decoding[0][0] <= self._reach:
            _, _, done = heapq.heappop(self._decoding)
            if not done.done():
                done.set_result(None)
        self._paid = self._paid + PREFILL * seconds if self._read else 0.0
        while self._read and self._read[0][0] <= self._paid:
            prompt, answer, done = self._read.popleft()
            self._paid -= prompt
            heapq.heappush(self._decoding, (self._reach + answer, next(self._numbers), done))
        running = self._read or self._decoding
        self._tick = asyncio.get_running_loop().call_later(TICK, self._advance) if running else None


# ── the game ────────────────────────────────────────────────────────────────────────────────────────────────────────


SIZE = 9
MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
LEGEND = (
    "@ is you, > is the exit, . is the floor; what is further than two steps away lies in the dark."
)


class Walk:
    """`crl.protocols.Environment`: a dark square with an exit. It acts at once."""

    async def reset(self, task: Task) -> Observation:
        draw = random.Random(task.seed)
        self._at, self._exit = (SIZE // 2, SIZE // 2), (draw.randrange(SIZE), draw.randrange(SIZE))
        return Observation(self._seen())

    async def step(self, text: str) -> StepResult:
        if text not in MOVES:
            return StepResult("Answer with north, south, east or west.", valid=False)
        self._at = (
            self._bounded(self._at[0] + MOVES[text][0]),
            self._bounded(self._at[1] + MOVES[text][1]),
        )
        won = self._at == self._exit
        return StepResult(self._seen(), reward=float(won), done=won, success=won)

    async def aclose(self) -> None: ...

    def _bounded(self, place: int) -> int:
        return min(max(place, 0), SIZE - 1)

    def _seen(self) -> str:
        (x, y), (exit_x, exit_y) = self._at, self._exit
        columns, rows = slice(max(x - 2, 0), x + 3), slice(max(y - 2, 0), y + 3)
        cells = [[" "] * SIZE for _ in range(SIZE)]
        for row in cells[rows]:
            row[columns] = "." * len(row[columns])
        if cells[exit_y][exit_x] == ".":
            cells[exit_y][exit_x] = ">"
        cells[y][x] = "@"
        return "\n".join([*map("".join, cells), LEGEND, f"You stand at {x} {y}."])


class Walks:
    """`crl.protocols.EnvironmentPool`: a new one for everybody."""

    async def acquire(self, task: Task) -> Environment:
        return Walk()

    async def release(self, environment: Environment) -> None: ...
    async def aclose(self) -> None: ...
