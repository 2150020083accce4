"""In-process engine: continuous batching of one Hugging Face causal LM on the CPU or one GPU.

`TorchEngine` runs on the event loop. It queues requests, resolves futures and decides when weights
are swapped. Its compute thread runs several passes in a row without returning to the event loop
(`_passes`). Before each pass, the thread checks for new and cancelled requests.

`Decoder` runs on the compute thread and owns the model and the cache. `Decoder.step` is one forward
pass: it reads new prompts together with the tokens of running requests (`crl.engines.passes`).
`SlotCache` holds keys and values. Running requests occupy its first rows, so attention works on
views. `Prefixes` stores the keys and values of a conversation's last turn for the next turn, until
the weights change.

A swap of weights waits until no request is decoding. Requests that arrive in the meantime wait for
the new weights.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from crl.engines.kv_cache import Prefixes, SlotCache
from crl.engines.passes import CACHED, Block, Pass
from crl.errors import EngineError, RolloutError
from crl.modeling import (
    InProcessWeights,
    checksum,
    head_logits,
    hidden_states,
    named_weights,
    token_logprobs,
)
from crl.protocols import PublishHandle
from crl.sync import FileWeights
from crl.types import Completion, Finish, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
Received = InProcessWeights | FileWeights

PREFILL_TOKENS = 2048
"""Maximum number of prompt tokens per pass. It limits how long a prefill delays running requests.

A single longer prompt is still read in one pass.
"""

SLICE = 0.05
"""Seconds of decoding after which the compute thread checks for other work, such as scoring."""


@dataclass(eq=False)
class Request:
    """State of one completion request."""

    ids: tuple[int, ...]
    sampling: Sampling
    draw: random.Random
    """Private generator of the request."""
    future: asyncio.Future[Completion]
    session: str | None = None
    """Name of the conversation; None if the request belongs to no conversation."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def finish(self) -> Finish | None:
        """Reason why the request is finished; None while it runs."""
        if self.sampled and self.sampled[-1] in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.sampled) == self.sampling.max_tokens else None

    def completion(self, finish: Finish) -> Completion:
        return Completion(tuple(self.sampled), tuple(self.logprobs), tuple(self.versions), finish)


class Decoder:
    """Model, cache and running requests.

    After construction, all methods are called on the compute thread only.
    """

    def __init__(self, model: PreTrainedModel, slots: int, version: int) -> None:
        self.model = model
        self.version = version
        self.running: list[Request] = []  # request i owns cache row i
        self._cache = SlotCache(model.config.num_hidden_layers, slots)
        self._prefixes = Prefixes(self._cache)
        model.set_attn_implementation(CACHED)
        self._flat = self._reads_flat()

    def unread(self, request: Request) -> int:
        """Return the number of prompt tokens that the first pass of a waiting request must read."""
        return len(request.ids) - self._prefixes.reusable(request.session, request.ids)

    @torch.inference_mode()
    def step(self, arrivals: Sequence[Request] = ()) -> list[Request]:
        """Run one pass: read the prompts of `arrivals` and sample one token for every request.

        Return the finished requests. Equal prompts among the arrivals are read once, except for
        requests that reuse the prefix of a conversation.
        """
        decoding = len(self.running)
        known = {id(r): self._prefixes.reusable(r.session, r.ids) for r in arrivals}
        first: dict[tuple[int, ...], int] = {}  # prompt → row of the request that reads it
        readers: list[Request] = []
        followers: list[Request] = []
        for request in sorted(arrivals, key=lambda r: len(r.ids)):
            if known[id(request)] or request.ids not in first:
                first.setdefault(request.ids, decoding + len(readers))
                readers.append(request)
            else:
                followers.append(request)
        self.running += [*readers, *followers]
        for row, request in enumerate(readers, start=decoding):
            self._prefixes.take(request.session, request.ids, row)
        new = [(r.sampled[-1],) for r in self.running[:decoding]] + [
            r.ids[known[id(r)] :] for r in readers
        ]
        starts = [len(r.ids) + len(r.sampled) - 1 for r in self.running[:decoding]] + [
            known[id(r)] for r in readers
        ]
        logits = self._forward(Pass(new, starts, decoding, self.model.device))
        if followers:
            sources, rows = (
                [first[r.ids] for r in followers],
                range(decoding + len(readers), len(self.running)),
            )
            self._cache.move(sources, rows, [len(r.ids) for r in followers])
            logits = torch.cat((logits, logits[sources]))
        return self._advance(logits)

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        """Return log p(ids[i] | ids[:i]) at temperature 1 for i ≥ 1."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        return token_logprobs(self.model, tokens, mask).logp[0, 1:].tolist()

    def load(self, weights: Received) -> None:
        """Copy new weights into the model and clear the prefixes.

        Raise `EngineError` if the names or the checksum differ from those of the sender.
        """
        own = named_weights(self.model)
        if tuple(own) != weights.manifest.names:
            raise EngineError("the published weights are not this model's: their names differ")
        for name, tensor in weights.tensors.items():
            own[name].copy_(tensor)
        self._prefixes.clear()  # they were computed with the old weights
        if checksum(own) != weights.checksum:
            raise EngineError(
                f"the weights of version {weights.version} arrived with another checksum"
            )
        self.version = weights.version

    @torch.inference_mode()
    def forget(self, requests: Sequence[Request]) -> None:
        """Free the rows of cancelled requests."""
        self._release([row for row, request in enumerate(self.running) if request in requests])

    @torch.inference_mode()
    def _reads_flat(self) -> bool:
        """Return whether the model can read several sequences in one row, without padding.

        Compare the hidden states of two sequences in one row with those of each sequence alone.
        """
        ids = [i % self.model.config.vocab_size for i in range(16)]
        parts = [ids[:9], ids[9:]][: self._cache.slots]
        alone = torch.stack(
            [
                hidden_states(self.model, torch.tensor([part], device=self.model.device))[0, -1]
                for part in parts
            ]
        )
        try:
            together = self._flat_states(Pass(parts, [0] * len(parts), 0, self.model.device))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the type of the error depends on the model's code
            return False
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        return bool((together - alone).norm() <= tolerance * alone.norm())

    def _forward(self, new: Pass) -> torch.Tensor:
        """Return the float32 logits [b, V] after each row's last token."""
        states = (
            self._flat_states(new)
            if self._flat
            else torch.cat([self._padded_states(new, b) for b in new.blocks])
        )
        return head_logits(self.model, states).float()

    def _flat_states(self, new: Pass) -> torch.Tensor:
        """Return the hidden states [b, h] at each row's last token. Read all tokens in one row."""
        self._cache.begin(new)
        states = self.model.base_model(
            input_ids=new.ids[None],
            attention_mask=self._no_mask,
            position_ids=new.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            reading=new,
        ).last_hidden_state
        return states[0, new.ends]

    def _padded_states(self, new: Pass, block: Block) -> torch.Tensor:
        """Return the hidden states [b, h] at the last tokens of a block, read as a padded batch."""
        self._cache.begin(new, block)
        states = self.model.base_model(
            input_ids=block.padded(new.ids),
            attention_mask=block.mask(self.model.dtype),
            position_ids=block.padded(new.positions),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return block.unpadded(states)[new.ends[block.rows] - block.tokens.start]

    @cached_property
    def _no_mask(self) -> torch.Tensor:
        """Placeholder mask. Transformers does not change a 4D mask, and `attend` ignores it."""
        return torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.model.device)

    def _advance(self, logits: torch.Tensor) -> list[Request]:
        """Sample one token for each running request and remove the finished ones. Return them."""
        tokens, logprobs = sample(logits, self.running)
        finished: list[int] = []
        for row, (request, token, logprob) in enumerate(
            zip(self.running, tokens, logprobs, strict=True)
        ):
            request.sampled.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if request.finish:
                finished.append(row)
                if request.session is not None:  # the last sampled token was not read yet
                    self._prefixes.keep(request.session, (*request.ids, *request.sampled[:-1]), row)
        done = [self.running[row] for row in finished]
        self._release(finished)
        return done

    def _release(self, rows: Sequence[int]) -> None:
        """Free `rows`, which must be in ascending order. Move the last running requests there."""
        free = set(rows)
        left = len(self.running) - len(free)
        sources = [row for row in range(left, len(self.running)) if row not in free]
        targets = [row for row in rows if row < left]
        if sources:
            moved = [self.running[row] for row in sources]
            self._cache.move(sources, targets, [len(r.ids) + len(r.sampled) - 1 for r in moved])
            for row, request in zip(targets, moved, strict=True):
                self.running[row] = request
        del self.running[left:]


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """Return one token per row of the float32 logits [b, V], and the log-prob of each token.

    Each request draws one uniform number from its own generator. The token is the inverse of the
    cumulative distribution at this number, so it does not depend on the other rows. Log-probs are
    those at the request's temperature. Temperature 0 is greedy, with log-probs at temperature 1.
    Raise `EngineError` if the log-prob of a token is not finite.
    """
    temperature = torch.tensor([r.sampling.temperature for r in requests], device=logits.device)
    greedy = temperature == 0
    log_p = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    tokens = logits.argmax(-1)
    if not bool(greedy.all()):
        cumulated = log_p.exp().cumsum(-1, dtype=torch.double)
        draws = torch.tensor(
            [r.draw.random() for r in requests], dtype=torch.double, device=logits.device
        )
        drawn = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:], right=True)[:, 0]
        tokens = torch.where(greedy, tokens, drawn.clamp(max=logits.shape[1] - 1))
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    if not bool(logprobs.isfinite().all()):
        raise EngineError("the model's logits are not finite: its weights are damaged")
    return tokens.tolist(), logprobs.tolist()


class TorchEngine:
    """`crl.protocols.Engine` in this process. Use and close an engine from one event loop only."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch: int,
        max_context: int,
        threads: int = 1,
        version: int = 0,
    ) -> None:
        """Create an engine for `model`, whose weights have the policy version `version`.

        * `max_batch`: maximum number of requests decoded together.
        * `max_context`: maximum number of prompt and completion tokens of one request.
        * `threads`: CPU threads of a forward pass.
        """
        self._decoder = Decoder(model, max_batch, version)
        self._max_batch, self._max_context = max_batch, max_context
        self._vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._thread = ThreadPoolExecutor(
            1, "engine", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._waiting: deque[Request] = deque()
        self._swap: tuple[Received, asyncio.Future[None]] | None = None
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None
        self.sampled_tokens = 0
        self.busy = 0.0

    @property
    def version(self) -> int:
        return self._decoder.version

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        """Sample one completion of `ids`. See `crl.protocols.Engine`.

        Raise `ValueError` if `rng` is None and the temperature is above 0.
        """
        await self.health()
        self._check(ids, sampling.max_tokens)
        if rng is None and sampling.temperature > 0:
            raise ValueError("sampling needs a seed: pass rng")
        request = Request(
            tuple(ids),
            sampling,
            random.Random(rng),
            asyncio.get_running_loop().create_future(),
            session,
        )
        self._waiting.append(request)
        return await self._answered(request.future)

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Return the log-probs of `ids`. See `crl.protocols.Engine`."""
        await self.health()
        self._check(ids, 0)
        try:
            return await self._compute(self._decoder.score, ids)
        except Exception as error:
            raise _failed(error) from error

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swap the weights. See `crl.protocols.Engine`.

        Running requests finish on the old weights. New requests wait for the swap. Raise
        `EngineError` for an unsupported kind of handle or while another swap is pending.
        """
        await self.health()
        if not isinstance(handle, Received):
            raise EngineError(f"the torch engine cannot receive weights over {handle.transport}")
        if self._swap is not None:
            raise EngineError("a swap of weights is already under way")
        done = asyncio.get_running_loop().create_future()
        self._swap = (handle, done)
        await self._answered(done)

    async def health(self) -> None:
        """Raise the `EngineError` that ended the engine, if there is one."""
        if self._dead is not None:
            raise self._dead

    async def aclose(self) -> None:
        """Stop the compute thread and fail all open requests with `EngineError`."""
        closed = self._dead = self._dead or EngineError("the engine is closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()
        self._die(closed)

    def _check(self, ids: Sequence[int], more: int) -> None:
        """Raise `RolloutError` if `ids` and `more` new tokens cannot be processed."""
        if not ids or len(ids) + more > self._max_context:
            raise RolloutError(
                "engine", f"{len(ids)} prompt + {more} new tokens do not fit {self._max_context}"
            )
        if not (min(ids) >= 0 and max(ids) < self._vocabulary):
            raise RolloutError(
                "engine", f"the prompt holds a token id outside the model's {self._vocabulary}"
            )

    async def _answered(self, future: asyncio.Future[T]) -> T:
        """Return the result of `future`. Start the serving task if it does not run yet.

        `_die` fails every future that is still open here.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._serve(), name="torch engine")
        self._wake.set()
        self._unanswered.add(future)
        try:
            return await future
        finally:
            self._unanswered.discard(future)

    async def _serve(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting or self._decoder.running or self._swap:
                    await self._slice()
        except EngineError as error:
            self._die(error)
        except Exception as error:  # such as out of memory; callers must not wait forever
            self._die(_failed(error))

    async def _slice(self) -> None:
        """Swap the weights if a swap is pending and no request runs. Otherwise run passes."""
        if self._swap is not None and not self._decoder.running:
            handle, done = self._swap
            await self._compute(self._decoder.load, handle)
            self._swap = None
            _resolve(done, None)
        else:
            await self._compute(self._passes, asyncio.get_running_loop())

    def _passes(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run passes on the compute thread for `SLICE` seconds, or until no request can run.

        Check for new requests, cancellations and a pending swap before each pass. Deliver finished
        completions after each pass.
        """
        decoder, end = self._decoder, time.perf_counter() + SLICE
        while self._dead is None:
            if abandoned := [r for r in decoder.running if r.future.cancelled()]:
                decoder.forget(abandoned)
            arrivals = self._admitted()
            if not decoder.running and not arrivals:
                return
            finished = decoder.step(arrivals)
            # Decide before the delivery. Otherwise the speed of the callers would determine which
            # requests share a pass.
            over = (not decoder.running and not self._waiting) or time.perf_counter() > end
            if finished:
                loop.call_soon_threadsafe(self._deliver, finished)
            if over:
                return

    def _admitted(self) -> list[Request]:
        """Remove and return the waiting requests that start now.

        While a swap is pending, no request starts. Otherwise `max_batch` and `PREFILL_TOKENS` limit
        the number of requests. Cancelled requests are dropped.
        """
        batch: list[Request] = []
        read: set[tuple[int, ...]] = set()
        tokens = 0
        while (
            self._waiting
            and self._swap is None
            and len(self._decoder.running) + len(batch) < self._max_batch
        ):
            request = self._waiting[0]
            unread = self._decoder.unread(request)
            if unread == len(request.ids) and request.ids in read:
                unread = 0  # an equal prompt is read once
            if batch and tokens + unread > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            if not request.future.cancelled():
                batch.append(request)
                read.add(request.ids)
                tokens += unread
        return batch

    def _deliver(self, finished: Sequence[Request]) -> None:
        for request in finished:
            assert request.finish is not None
            self.sampled_tokens += len(request.sampled)
            _resolve(request.future, request.completion(request.finish))

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of `work(*args)`, run on the compute thread. Add the time to `busy`."""

        def timed() -> T:
            begin = time.perf_counter()
            try:
                return work(*args)
            finally:
                self.busy += time.perf_counter() - begin

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    def _die(self, error: EngineError) -> None:
        """Mark the engine as dead and fail all open futures. The first error is stored."""
        self._dead = self._dead or error
        for future in self._unanswered:
            if not future.done():
                future.set_exception(self._dead)
        self._waiting.clear()


def _failed(error: Exception) -> EngineError:
    """Return an `EngineError` with `error` as its cause."""
    death = EngineError(f"the engine failed: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Set the result of `future`, unless it is already done or cancelled."""
    if not future.done():
        future.set_result(value)
