"""In-process engine: continuous batching of one Hugging Face causal LM on the CPU or one GPU.

`TorchEngine` runs on the event loop. It queues requests, resolves futures and decides when weights
are swapped. Its compute thread runs several passes in a row without returning to the event loop
(`_run_passes`). Before each pass, the thread checks for new and cancelled requests.

`Decoder` runs on the compute thread and owns the model and the cache. `Decoder.step` is one forward
pass: it reads new prompts together with the tokens of running requests (`crl.engines.passes`).
A long prompt is read in chunks, one per pass, so that running requests go on in the meantime.
`SlotCache` holds keys and values. Running requests occupy its first rows, so attention works on
views. A prompt that begins like that of a running request copies this part. `PrefixCache` stores
the keys and values of a conversation's last turn for the next turn, until the weights change.

A swap of weights waits until no request is read or decoded. Requests that arrive in the meantime
wait for the new weights.
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
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from crl.engines import PREFILL_TOKENS
from crl.engines.kv_cache import PrefixCache, SlotCache, common_prefix
from crl.engines.passes import CACHED_ATTENTION, Block, Pass
from crl.errors import EngineError, RolloutError
from crl.modeling.loading import (
    InProcessWeights,
    checksum,
    head_logits,
    hidden_states,
    named_weights,
    token_logprobs,
)
from crl.modeling.truncation import kept_sets, truncate
from crl.modeling.weights import FileWeights
from crl.protocols import PublishHandle
from crl.types import Completion, Finish, KeptSet, Sampling
from crl.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
SupportedHandle = InProcessWeights | FileWeights

SLICE_S = 0.05
"""Seconds of decoding after which the compute thread checks for other work, such as scoring."""

CPU_PREFILL_FLOPS = 5e10
"""Operations for the prompts of one pass on a CPU: about a second of one core.

A decoding request waits this long at most for its next token, besides the decoding itself.
"""

MIN_PREFILL_TOKENS = 64
"""Minimum of the maximum number of prompt tokens in a pass.

With fewer tokens, reading the weights would take most of the time.
"""

MIN_SHARED_TOKENS = 32
"""Minimum number of leading tokens that a prompt copies from a running request."""


@dataclass(eq=False)
class Request:
    """State of one completion request."""

    ids: tuple[int, ...]
    sampling: Sampling
    generator: random.Random
    """Private generator of the request."""
    future: asyncio.Future[Completion]
    session: str | None = None
    """Name of the conversation; None if the request belongs to no conversation."""
    read: int = 0
    """Number of prompt tokens in the cache."""
    sampled: list[int] = field(default_factory=list)
    columns: list[tuple[float, int, KeptSet]] = field(default_factory=list)
    """Log-prob, policy version and kept set of each sampled token."""

    @property
    def finish(self) -> Finish | None:
        """Reason why the request is finished; None while it runs."""
        if self.sampled and self.sampled[-1] in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.sampled) == self.sampling.max_tokens else None

    def completion(self, finish: Finish) -> Completion:
        logprobs, versions, kept = zip(*self.columns, strict=True)
        return Completion(tuple(self.sampled), logprobs, versions, finish, kept)


def prefill_limit(model: PreTrainedModel) -> int:
    """Return the maximum number of prompt tokens in one pass.

    On a GPU this is `PREFILL_TOKENS`. On a CPU, larger models have shorter passes
    (`CPU_PREFILL_FLOPS`): each weight takes two operations per token.
    """
    if model.device.type != "cpu":
        return PREFILL_TOKENS
    tokens = int(CPU_PREFILL_FLOPS / (2 * model.num_parameters()))
    return max(MIN_PREFILL_TOKENS, min(tokens, PREFILL_TOKENS))


class Decoder:
    """Model, cache and running requests.

    After construction, all methods are called on the compute thread only.
    """

    def __init__(self, model: PreTrainedModel, slots: int, version: int) -> None:
        self.model = model
        self.version = version
        self.prefill_limit = prefill_limit(model)
        self.running: list[Request] = []  # request i owns cache row i
        self.reading: Request | None = None
        """Request whose prompt is longer than `prefill_limit`, until it is read.

        It owns the cache row after those of the running requests.
        """
        self._cache = SlotCache(model.config.num_hidden_layers, slots, model.device)
        self._prefixes = PrefixCache(self._cache)
        model.set_attn_implementation(CACHED_ATTENTION)
        self._packed = self._supports_packing()

    @property
    def requests(self) -> list[Request]:
        """All requests that occupy a row."""
        return self.running if self.reading is None else [*self.running, self.reading]

    @property
    def busy(self) -> bool:
        """Whether a request occupies a row."""
        return bool(self.requests)

    def continues(self, request: Request) -> bool:
        """Return whether a waiting request continues a conversation whose prefix is stored."""
        return self._prefixes.reusable(request.session, request.ids) > 0

    def unread_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens that a waiting request must read."""
        reusable = self._prefixes.reusable(request.session, request.ids)
        return len(request.ids) - (reusable or self._shared(request.ids)[1])

    def _shared(self, ids: tuple[int, ...]) -> tuple[int, int]:
        """Return the row of the running request whose prompt begins most like `ids`.

        The second number is that of the common leading tokens, without the last token of `ids`,
        whose logits must be computed. It is 0 if there are too few.
        """
        known, best = ids[:-1], (0, 0)
        start = known[:MIN_SHARED_TOKENS]
        if len(start) < MIN_SHARED_TOKENS:
            return best
        for row, other in enumerate(self.running):
            if other.ids[:MIN_SHARED_TOKENS] == start:
                best = max(best, (row, common_prefix(other.ids, known)), key=itemgetter(1))
        return best

    @torch.inference_mode()
    def step(self, arrivals: Sequence[Request] = ()) -> list[Request]:
        """Run one pass: read the prompts of `arrivals` and sample one token for every request.

        Return the finished requests. Equal prompts among the arrivals are read once, except for
        requests that reuse the prefix of a conversation. A prompt of more than `prefill_limit`
        tokens must be the only arrival. It is read in chunks by this and the next passes, which
        have no arrivals.
        """
        decoding = len(self.running)
        readers, duplicates = self._divide(arrivals)
        if self.reading is not None:
            readers = [self.reading]
        else:
            for row, request in enumerate(readers, start=decoding):
                request.read = self._reuse(request, row)
        new_tokens = [(r.sampled[-1],) for r in self.running] + [
            r.ids[r.read : r.read + self.prefill_limit] for r in readers
        ]
        starts = [len(r.ids) + len(r.sampled) - 1 for r in self.running] + [r.read for r in readers]
        logits = self._forward(Pass(new_tokens, starts, decoding, self.model.device))
        for request, tokens in zip(readers, new_tokens[decoding:], strict=True):
            request.read += len(tokens)
        if readers and readers[-1].read < len(readers[-1].ids):
            self.reading = readers.pop()
            logits = logits[:decoding]
        else:
            self.reading = None
        rows = {request.ids: row for row, request in enumerate(readers, start=decoding)}
        self.running += [*readers, *duplicates]
        if duplicates:
            sources = [rows[r.ids] for r in duplicates]
            targets = range(decoding + len(readers), len(self.running))
            self._cache.move(sources, targets, [len(r.ids) for r in duplicates])
            logits = torch.cat((logits, logits[sources]))
        return self._sample_tokens(logits) if self.running else []

    def _divide(self, arrivals: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Return the requests that read their prompt, and those with the same prompt as one.

        Prompts of similar length are neighbours.
        """
        readers: list[Request] = []
        duplicates: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        for request in sorted(arrivals, key=lambda r: len(r.ids)):
            if request.ids in prompts and not self.continues(request):
                duplicates.append(request)
            else:
                prompts.add(request.ids)
                readers.append(request)
        return readers, duplicates

    def _reuse(self, request: Request, row: int) -> int:
        """Copy the keys and values of the prompt's first tokens into `row`, if they are known.

        Return the number of these tokens.
        """
        if tokens := self._prefixes.restore(request.session, request.ids, row):
            return tokens
        source, tokens = self._shared(request.ids)
        if tokens:
            self._cache.move([source], [row], [tokens])
        return tokens

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        """Return log p(ids[i] | ids[:i]) at temperature 1 for i ≥ 1."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        return token_logprobs(self.model, tokens, mask).logp[0, 1:].tolist()

    def load(self, weights: SupportedHandle) -> None:
        """Copy new weights into the model and clear the prefixes.

        Raise `EngineError` if the names or the checksum differ from those of the sender.
        """
        own = named_weights(self.model)
        if tuple(own) != weights.manifest.names:
            raise EngineError(
                "the published weights belong to another model: the names of the tensors differ"
            )
        for name, tensor in weights.tensors.items():
            own[name].copy_(tensor)
        self._prefixes.clear()  # they were computed with the old weights
        if checksum(own) != weights.checksum:
            raise EngineError(
                f"the weights of version {weights.version} arrived with a different checksum"
            )
        self.version = weights.version

    @torch.inference_mode()
    def abort(self, requests: Sequence[Request]) -> None:
        """Free the rows of cancelled requests."""
        if self.reading in requests:
            self.reading = None
        self._release([row for row, request in enumerate(self.running) if request in requests])

    @torch.inference_mode()
    def _supports_packing(self) -> bool:
        """Return whether the model can read several sequences in one row, without padding.

        Compare the hidden states of two sequences in one row with those of each sequence alone.
        """
        ids = [i % self.model.config.vocab_size for i in range(16)]
        parts = [ids[:9], ids[9:]][: self._cache.slots]
        separate = torch.stack(
            [
                hidden_states(self.model, torch.tensor([part], device=self.model.device))[0, -1]
                for part in parts
            ]
        )
        try:
            packed = self._packed_states(Pass(parts, [0] * len(parts), 0, self.model.device))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the type of the error depends on the model's code
            return False
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        return bool((packed - separate).norm() <= tolerance * separate.norm())

    def _forward(self, forward_pass: Pass) -> torch.Tensor:
        """Return the float32 logits [b, V] after each row's last token."""
        states = (
            self._packed_states(forward_pass)
            if self._packed
            else torch.cat([self._padded_states(forward_pass, b) for b in forward_pass.blocks])
        )
        return head_logits(self.model, states).float()

    def _packed_states(self, forward_pass: Pass) -> torch.Tensor:
        """Return the hidden states [b, h] at each row's last token. Read all tokens in one row."""
        self._cache.begin(forward_pass)
        states = self.model.base_model(
            input_ids=forward_pass.ids[None],
            attention_mask=self._no_mask,
            position_ids=forward_pass.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            forward_pass=forward_pass,
        ).last_hidden_state
        return states[0, forward_pass.ends]

    def _padded_states(self, forward_pass: Pass, block: Block) -> torch.Tensor:
        """Return the hidden states [b, h] at the last tokens of a block, read as a padded batch."""
        self._cache.begin(forward_pass, block)
        states = self.model.base_model(
            input_ids=block.padded(forward_pass.ids),
            attention_mask=block.mask(self.model.dtype),
            position_ids=block.padded(forward_pass.positions),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return block.unpadded(states)[forward_pass.ends[block.rows] - block.tokens.start]

    @cached_property
    def _no_mask(self) -> torch.Tensor:
        """Placeholder mask. Transformers does not change a 4D mask, and `attend` ignores it."""
        return torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.model.device)

    def _sample_tokens(self, logits: torch.Tensor) -> list[Request]:
        """Sample one token for each running request and remove the finished ones. Return them."""
        finished: list[int] = []
        for row, (request, token, logprob, kept) in enumerate(
            zip(self.running, *sample(logits, self.running), strict=True)
        ):
            request.sampled.append(token)
            request.columns.append((logprob, self.version, kept))
            if request.finish:
                finished.append(row)
                if request.session is not None:  # the last sampled token was not read yet
                    self._prefixes.store(
                        request.session, (*request.ids, *request.sampled[:-1]), row
                    )
        done = [self.running[row] for row in finished]
        self._release(finished)
        return done

    def _release(self, rows: Sequence[int]) -> None:
        """Free `rows`, which must be in ascending order. Move the last running requests there."""
        free, reading_row = set(rows), len(self.running)
        remaining = len(self.running) - len(free)
        sources = [row for row in range(remaining, len(self.running)) if row not in free]
        targets = [row for row in rows if row < remaining]
        if sources:
            moved = [self.running[row] for row in sources]
            self._cache.move(sources, targets, [len(r.ids) + len(r.sampled) - 1 for r in moved])
            for row, request in zip(targets, moved, strict=True):
                self.running[row] = request
        del self.running[remaining:]
        if self.reading is not None and free:
            self._cache.move([reading_row], [remaining], [self.reading.read])


def sample(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[int], list[float], list[KeptSet]]:
    """Return a token for each row of the float32 logits [b, V], its log-prob and its kept set.

    Each request draws one uniform number from its own generator. The token is the inverse of the
    cumulative distribution at this number, so it does not depend on the other rows. Log-probs are
    those at the request's temperature, renormalised over the tokens that top-p and top-k keep.
    Temperature 0 is greedy, with log-probs at temperature 1 and without truncation.
    Raise `EngineError` if the log-prob of a token is not finite.
    """
    temperature = torch.tensor([r.sampling.temperature for r in requests], device=logits.device)
    greedy = temperature == 0
    log_p = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    kept = _truncate_rows(log_p, [request.sampling for request in requests])
    tokens = logits.argmax(-1)
    if not bool(greedy.all()):
        cumulative = log_p.exp().cumsum(-1, dtype=torch.double)
        draws = torch.tensor(
            [r.generator.random() for r in requests], dtype=torch.double, device=logits.device
        )
        drawn = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[
            :, 0
        ]
        tokens = torch.where(greedy, tokens, drawn.clamp(max=logits.shape[1] - 1))
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    if not bool(logprobs.isfinite().all()):
        raise EngineError("the model's logits are not finite, so its weights are damaged")
    return tokens.tolist(), logprobs.tolist(), kept


def _truncate_rows(log_p: torch.Tensor, samplings: Sequence[Sampling]) -> list[KeptSet]:
    """Truncate the log-probs [b, V] in place and return the kept set of each row."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.truncated]
    kept: list[KeptSet] = [b""] * len(samplings)
    if rows:
        top_p, top_k = (
            torch.tensor([getattr(samplings[row], name) for row in rows], device=log_p.device)
            for name in ("top_p", "top_k")
        )
        log_p[rows] = truncated = truncate(log_p[rows], top_p, top_k)
        for row, ids in zip(rows, kept_sets(truncated), strict=True):
            kept[row] = ids
    return kept


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
        self._swap: tuple[SupportedHandle, asyncio.Future[None]] | None = None
        self._open_futures: set[asyncio.Future[Any]] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self.sampled_tokens = 0
        self.busy_s = 0.0

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

        Raise `ValueError` if `rng` is None and the temperature is above 0, or for a JSON schema.
        """
        await self.health()
        self._check(ids, sampling.max_tokens)
        if sampling.json_schema:
            raise ValueError("the torch engine has no structured outputs: use the vLLM engine")
        if rng is None and sampling.temperature > 0:
            raise ValueError("sampling at a temperature above 0 needs a seed: pass rng")
        request = Request(
            tuple(ids),
            sampling,
            random.Random(rng),
            asyncio.get_running_loop().create_future(),
            session,
        )
        self._waiting.append(request)
        return await self._wait_for(request.future)

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Return the log-probs of `ids`. See `crl.protocols.Engine`."""
        await self.health()
        self._check(ids, 0)
        try:
            return await self._compute(self._decoder.score, ids)
        except Exception as error:
            raise _engine_error(error) from error

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swap the weights. See `crl.protocols.Engine`.

        Running requests finish on the old weights. New requests wait for the swap. Raise
        `EngineError` for an unsupported kind of handle or while another swap is pending.
        """
        await self.health()
        if not isinstance(handle, SupportedHandle):
            raise EngineError(f"the torch engine cannot receive weights over {handle.transport}")
        if self._swap is not None:
            raise EngineError("another update of the weights is still in progress")
        done = asyncio.get_running_loop().create_future()
        self._swap = (handle, done)
        await self._wait_for(done)

    async def health(self) -> None:
        """Raise the `EngineError` that ended the engine, if there is one."""
        if self._failure is not None:
            raise self._failure

    def details(self) -> list[str]:
        requests = counted(len(self._open_futures), "request")
        swap = "; new weights wait for them" if self._swap else ""
        return [f"{requests} in flight, {len(self._waiting)} of them not begun{swap}"]

    async def aclose(self) -> None:
        """Stop the compute thread and fail all open requests with `EngineError`."""
        closed = self._failure = self._failure or EngineError("the engine is closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()
        self._fail_all(closed)

    def _check(self, ids: Sequence[int], new_tokens: int) -> None:
        """Raise `RolloutError` if `ids` and `new_tokens` further tokens cannot be processed."""
        if not ids or len(ids) + new_tokens > self._max_context:
            raise RolloutError(
                "engine",
                f"{len(ids)} prompt tokens and {new_tokens} new tokens do not fit into the "
                f"context of {self._max_context} tokens",
            )
        if not (min(ids) >= 0 and max(ids) < self._vocabulary):
            raise RolloutError(
                "engine",
                f"the prompt contains a token id outside the model's vocabulary of "
                f"{self._vocabulary} tokens",
            )

    async def _wait_for(self, future: asyncio.Future[T]) -> T:
        """Return the result of `future`. Start the serving task if it does not run yet.

        `_fail_all` fails every future that is still open here.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._serve(), name="torch engine")
        self._wake.set()
        self._open_futures.add(future)
        try:
            return await future
        finally:
            self._open_futures.discard(future)

    async def _serve(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting or self._decoder.busy or self._swap:
                    await self._run_slice()
        except EngineError as error:
            self._fail_all(error)
        except Exception as error:  # such as out of memory; callers must not wait forever
            self._fail_all(_engine_error(error))

    async def _run_slice(self) -> None:
        """Swap the weights if a swap is pending and no request runs. Otherwise run passes."""
        if self._swap is not None and not self._decoder.busy:
            handle, done = self._swap
            await self._compute(self._decoder.load, handle)
            self._swap = None
            _resolve(done, None)
        else:
            await self._compute(self._run_passes, asyncio.get_running_loop())

    def _run_passes(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run passes on the compute thread for `SLICE_S` seconds, or until no request can run.

        Check for new requests, cancellations and a pending swap before each pass. Deliver finished
        completions after each pass.
        """
        decoder, end = self._decoder, time.perf_counter() + SLICE_S
        while self._failure is None:
            if cancelled := [r for r in decoder.requests if r.future.cancelled()]:
                decoder.abort(cancelled)
            arrivals = self._admit()
            if not decoder.busy and not arrivals:
                return
            finished = decoder.step(arrivals)
            # Decide before the delivery. Otherwise the speed of the callers would determine which
            # requests share a pass.
            slice_done = (not decoder.busy and not self._waiting) or time.perf_counter() > end
            if finished:
                loop.call_soon_threadsafe(self._deliver, finished)
            if slice_done:
                return

    def _admit(self) -> list[Request]:
        """Remove and return the waiting requests that start now.

        While a swap is pending or a long prompt is read, no request starts. Otherwise `max_batch`
        and the decoder's `prefill_limit` limit the number of requests. A longer prompt starts
        alone. Cancelled requests are dropped.
        """
        batch: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while (
            self._waiting
            and self._swap is None
            and self._decoder.reading is None
            and len(self._decoder.running) + len(batch) < self._max_batch
        ):
            request = self._waiting[0]
            unread_tokens = self._decoder.unread_tokens(request)
            if request.ids in prompts and not self._decoder.continues(request):
                unread_tokens = 0  # an equal prompt is read once
            if batch and tokens + unread_tokens > self._decoder.prefill_limit:
                break
            self._waiting.popleft()
            if not request.future.cancelled():
                batch.append(request)
                prompts.add(request.ids)
                tokens += unread_tokens
        return batch

    def _deliver(self, finished: Sequence[Request]) -> None:
        for request in finished:
            assert request.finish is not None
            self.sampled_tokens += len(request.sampled)
            _resolve(request.future, request.completion(request.finish))

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the compute thread, return its result and add to `busy_s`."""

        def timed() -> T:
            begin = time.perf_counter()
            try:
                return work(*args)
            finally:
                self.busy_s += time.perf_counter() - begin

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    def _fail_all(self, error: EngineError) -> None:
        """Mark the engine as dead and fail all open futures. The first error is stored."""
        self._failure = self._failure or error
        for future in self._open_futures:
            if not future.done():
                future.set_exception(self._failure)
        self._waiting.clear()


def _engine_error(error: Exception) -> EngineError:
    """Return an `EngineError` with `error` as its cause."""
    failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Set the result of `future`, unless it is already done or cancelled."""
    if not future.done():
        future.set_result(value)
