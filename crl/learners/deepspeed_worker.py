"""Rank of a DeepSpeed learner: a process that `crl.learners.deepspeed` starts and controls.

* `ParentPipe` is the pipe to the parent process. It receives commands, and sends answers and a
  heartbeat every second. The heartbeat contains the progress of the rank.
* `ZeroTrainer` is the shared training step on a model whose optimizer state, gradients and weights
  ZeRO partitions among the ranks.
* `Rank` executes the commands. All ranks receive the same commands in the same order, because each
  command is a collective operation.

When the pipe closes, the process ends immediately.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import faulthandler
import functools
import math
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed.utils.tensor_fragment import (
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from safetensors import safe_open

from crl.errors import CrlError
from crl.learners.deepspeed import (
    HEARTBEAT_S,
    LOAD_TIMEOUT_S,
    RankAssignment,
    RankSettings,
    frame,
    read_frame,
)
from crl.learners.optimizer_file import (
    MOMENTS,
    OPTIMIZER_FILE,
    optimizer_metadata,
    optimizer_path,
    restore_schedule,
)
from crl.learners.step import MetricAccumulator, MicroBatch, Trainer, adamw, probe_minibatch
from crl.modeling.loading import TokenStats, checksum, load_model, require_packing, token_logprobs
from crl.modeling.lora import (
    adapter_parameters,
    add_adapter,
    base_weights,
    dropout_of,
    layer_parameters,
    merged_weight,
    read_adapter,
    write_adapter,
)
from crl.modeling.truncation import KeptTokens
from crl.modeling.weights import LOOPBACK_ADDRESS, manifest_of, weight_bytes, write_tensors
from crl.protocols import WeightManifest
from crl.scratch import remove_all_stale_folders
from crl.types import Minibatch, StepStats, TokenTrace, TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DUMMY_SAMPLE = TrainSample(TokenTrace((0, 0), (0, 1), (0.0, 0.0), (-1, 0)), 0.0, 0.0)
"""Dummy sample for a rank that has fewer micro-batches than another rank.

The rank computes the sample and drops the result, because all ranks must take part in every pass.
"""


# ── pipe to the parent ────────────────────────────────────────────────────────────────────────────


class ParentPipe:
    """Pipe to the parent process. Everything that this process prints is written to its log."""

    def __init__(self) -> None:
        self._in: BinaryIO = sys.stdin.buffer
        self._out = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        self._progress = (0, 0)
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        os.dup2(2, 1)

    def read_assignment(self) -> RankAssignment:
        """Read and return the first message. Start the listener and heartbeat threads."""
        assignment = read_frame(self._in)
        threading.Thread(target=self._listen, args=(assignment.folder,), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        return assignment

    def command(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next command and return its name and arguments."""
        command = self._commands.get()
        self._progress = (self._progress[0] + 1, 0)
        return command

    def tick(self) -> None:
        """Count one unit of progress within the current command.

        Call this method at the same points of the work in all ranks. A rank that waits for another
        rank then has a higher count than that rank.
        """
        begun, done = self._progress
        self._progress = (begun, done + 1)

    def send(self, kind: str, value: object = None) -> None:
        """Send a message to the parent."""
        with self._lock:
            self._out.writelines(frame((kind, value)))
            self._out.flush()

    def _listen(self, folder: Path) -> None:
        """Receive commands until the pipe closes, then clean up and end the process."""
        try:
            while True:
                self._commands.put(read_frame(self._in))
        except (EOFError, OSError):
            # The parent has closed the pipe, or has ended without cleaning up.
            shutil.rmtree(folder, ignore_errors=True)
            remove_all_stale_folders()
        finally:
            os._exit(0)

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            self.send("beat", self._progress)


def main() -> None:
    """Run a rank: execute commands until the parent closes the pipe."""
    faulthandler.register(signal.SIGUSR1)  # the parent requests stack dumps of a stuck rank
    pipe = ParentPipe()
    try:
        rank = Rank(pipe.read_assignment(), pipe)
        pipe.send("done", weight_bytes(rank.manifest()))
        while True:
            name, arguments = pipe.command()
            pipe.send("done", getattr(rank, name)(*arguments))
    except BaseException as error:
        crl_error = error if isinstance(error, CrlError) else None
        pipe.send(
            "failed",
            (f"{type(error).__name__}: {error}", traceback.format_exc(), pickle.dumps(crl_error)),
        )
        # Do not end here: that would break the connections of the other ranks. The parent must
        # receive this error before their errors.
        threading.Event().wait()


# ── training step ─────────────────────────────────────────────────────────────────────────────────


class Scorer(torch.nn.Module):
    """Computation of log-probs as a module.

    DeepSpeed wraps this module. ZeRO-3 gathers the weights during a call and then releases them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        temperature: float,
        reference: PreTrainedModel | None,
        kept: KeptTokens | None,
    ) -> torch.Tensor:
        """Return `TokenStats` as one tensor [3, b, t].

        With a single output, the backward pass is the same in all ranks, whichever parts a loss
        uses. The collective operations of the ranks then match.
        """
        return torch.stack(
            token_logprobs(self.model, ids, mask, temperature, reference=reference, kept=kept)
        )


class ZeroTrainer(Trainer):
    """Shared training step on one rank's share of every minibatch.

    Each rank maps the files of the whole model into memory; ZeRO then partitions the model. The
    ranks share the mapped pages, so host memory does not hold the model once per rank. Weights that
    are converted to another precision are copied by each rank. A reference model for the KL remains
    whole on every rank; the reference of an adapter is its base model, which needs no copy.

    The optimizer holds the adapter alone if one is trained. ZeRO-3 also partitions the frozen base
    model. In bfloat16, DeepSpeed rounds the adapter for the passes and updates float32 copies.

    DeepSpeed averages gradients over ranks, but the losses of the shares must be summed. Therefore
    each loss is multiplied by the number of ranks. All ranks compute the same number of
    micro-batches, and all of them make or skip an update together.
    """

    def __init__(
        self, settings: RankSettings, ranks: int, device: torch.device, tick: Callable[[], None]
    ) -> None:
        dtype = getattr(torch, settings.compute.precision)
        path, key = settings.model.path, settings.model.key
        model = load_model(path, torch.device("cpu"), dtype, key=key)
        require_packing(model, path, key)  # before ZeRO partitions the model
        if settings.model.adapter:
            add_adapter(model, settings.model.adapter, f"{key.partition('.')[0]}.lora")
        fused = settings.zero.offload or device.type == "cuda"
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, schedule = adamw(trained, settings.optimizer, fused=fused)
        super().__init__(model, optimizer, schedule, settings.loss, settings.train)
        if self._reference is not None and self._reference is not model:
            self._reference.to(device)  # pyright: ignore[reportArgumentType]
        self.stage, self._ranks, self._device, self._tick = settings.zero.stage, ranks, device, tick
        self.rank = dist.get_rank()
        self.engine: Any = deepspeed.initialize(
            model=Scorer(model), optimizer=optimizer, config=zero_config(settings, ranks)
        )[0]
        self._create_optimizer_state()

    def _gradient(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, mismatch_version: int | None
    ) -> float:
        """Compute the gradient of the whole minibatch and return its loss, summed over the ranks.

        See `Trainer._gradient`.
        """
        if self.stage == 0:
            self.optimizer.zero_grad(set_to_none=True)
        own = [batch for _, batch in self._micro_batches(minibatch)]
        count = max(self._max_over_ranks(len(own)), 1)
        total = 0.0
        for i in range(count):
            last = i == count - 1
            self.engine.set_gradient_accumulation_boundary(last)
            with dropout_of(self._dropout, *self._address, self.rank, i):
                if i < len(own):
                    loss = self._loss(own[i], minibatch.total_tokens, accumulator, mismatch_version)
                    total += loss.item()
                else:
                    loss = self._dummy_loss()
                self._tick()
                if last:
                    total = self._sum_over_ranks(total)
                    # A loss that is not finite may have a finite gradient. A gradient of NaN makes
                    # all ranks skip the update.
                    loss = loss if math.isfinite(total) else loss * math.nan
                self.engine.backward(loss * self._ranks)
        return total

    def _update(self, total: float) -> float | None:
        self._tick()
        if self.stage == 0:
            return super()._update(total)
        self.engine.step()
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else None

    def _token_stats(self, batch: MicroBatch) -> TokenStats:
        self._tick()
        return TokenStats(
            *self.engine(
                batch.ids, batch.mask, self.settings.temperature, self._reference, batch.kept
            )
        )

    def _gather_metrics(self, accumulator: MetricAccumulator) -> MetricAccumulator:
        shares: list[Any] = [None] * self._ranks
        rows = [
            ({name: float(value) for name, value in metrics.items()}, tokens)
            for metrics, tokens in accumulator.rows
        ]
        dist.all_gather_object(shares, rows)
        return MetricAccumulator([row for share in shares for row in share])

    @torch.no_grad()
    def _recompute_logprobs(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, version: int
    ) -> Minibatch:
        missing = self._missing_passes(self._to_recompute(minibatch))
        recomputed = super()._recompute_logprobs(minibatch, accumulator, version)
        self._run_dummy_passes(missing)
        return recomputed

    @torch.no_grad()
    def _measure_probe(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, version: int
    ) -> None:
        missing = self._missing_passes(probe_minibatch(minibatch.probe))
        super()._measure_probe(minibatch, accumulator, version)
        self._run_dummy_passes(missing)

    def _missing_passes(self, minibatch: Minibatch) -> int:
        """Return how many micro-batches this rank has fewer than the rank with the most.

        Call this method before the first micro-batch, because all ranks take part in this
        exchange and in every pass.
        """
        own = sum(1 for _ in self._micro_batches(minibatch))
        return self._max_over_ranks(own) - own

    def _run_dummy_passes(self, passes: int) -> None:
        """Run `passes` forward passes on the dummy sample."""
        for _ in range(passes):
            self._token_stats(self._dummy_batch())

    def _dummy_batch(self) -> MicroBatch:
        return MicroBatch.of([DUMMY_SAMPLE], self._device)

    def _dummy_loss(self) -> torch.Tensor:
        """Return a loss of 0 whose backward pass is that of a micro-batch."""
        return self._token_stats(self._dummy_batch()).logp.sum() * 0.0

    def _max_over_ranks(self, count: int) -> int:
        """Return the maximum of `count` over all ranks."""
        largest = torch.tensor(count, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def _sum_over_ranks(self, value: float) -> float:
        """Return the sum of `value` over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total)

    def _create_optimizer_state(self) -> None:
        """Create the optimizer state with an update at learning rate 0.

        `save` and `load` need an existing state.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(self._dummy_loss())
        self.engine.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.updates = 0

    @property
    def updates(self) -> int:
        """Number of updates so far, which AdamW uses to correct the bias of its moments."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(count)


def zero_config(settings: RankSettings, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    The batch sizes are placeholders: a step uses as many micro-batches as it needs. In bfloat16,
    gradients are summed in float32 over micro-batches and ranks. An update that is not finite is
    skipped, as in float32.
    """
    compute = settings.compute
    zero: dict[str, Any] = {"stage": settings.zero.stage}
    if settings.zero.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": compute.device == "cuda"}
    bfloat16 = compute.precision == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        "gradient_clipping": settings.train.max_grad_norm if settings.zero.stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bfloat16, "check_grad_overflow": bfloat16},
        **(
            {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
            if bfloat16
            else {}
        ),
        "steps_per_print": None,
    }


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


class Rank:
    """Commands of the parent. The parent uses the answer of rank 0."""

    def __init__(self, assignment: RankAssignment, pipe: ParentPipe) -> None:
        """Join the process group and load the model. Progress is reported to `pipe`."""
        settings = assignment.settings
        compute = settings.compute
        torch.set_num_threads(compute.threads)
        if compute.deterministic:
            torch.use_deterministic_algorithms(True)
        self._device = torch.device(compute.device)
        self._is_rank0 = assignment.rank == 0
        self._settings, self._rank, self._ranks = settings, assignment.rank, assignment.ranks
        # Do not compile DeepSpeed's ops: an interrupted compilation would hang every later run.
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
        dist.init_process_group(
            "nccl" if compute.device == "cuda" else "gloo",
            init_method=f"file://{assignment.folder / 'ranks'}",
            rank=assignment.rank,
            world_size=assignment.ranks,
            # The shorter timeouts of the parent must expire first, because the parent then collects
            # the stacks of all ranks.
            timeout=timedelta(seconds=2 * max(settings.timeout, LOAD_TIMEOUT_S)),
        )
        self._pipe, self._tick = pipe, pipe.tick
        self._trainer = ZeroTrainer(settings, assignment.ranks, self._device, pipe.tick)
        self._model, self._adapter = self._trainer.model, settings.model.adapter
        self._nccl_group: Any = None

    def step(self, minibatches: Sequence[Minibatch], version: int) -> StepStats:
        return self._trainer.step(minibatches, version)

    def publish(self, path: Path | None) -> tuple[int, WeightManifest] | None:
        """Return checksum and manifest of the weights on rank 0, and None on other ranks.

        Rank 0 writes the weights to `path`. If `path` is None, the ranks only gather the weights
        and rank 0 computes the checksum; `broadcast` gathers the weights again when the engines
        wait for them.
        """
        manifest = self.manifest()
        if path is not None:
            crc = self._write(path, manifest, self._weights())
        else:
            crc = functools.reduce(
                lambda crc, named: checksum(dict([named]), crc) if self._is_rank0 else 0,
                self._weights(),
                0,
            )
        return (crc, manifest) if self._is_rank0 else None

    def broadcast(self, port: int, world_size: int) -> None:
        """Send the weights from rank 0 to vLLM's workers over NCCL.

        Rank 0 is also rank 0 of the NCCL group. The weights are gathered one by one and packed in
        vLLM's format.

        This method has not been run, because no GPUs were available when it was written. It was
        checked against the source of vLLM 0.32.0.
        """
        if not self._is_rank0:
            for _ in self._weights():
                pass
            return
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._nccl_group is None:  # the workers join the group before the first transfer
            self._nccl_group = trainer_init(
                {"master_address": LOOPBACK_ADDRESS, "master_port": port, "world_size": world_size}
            )
        packed_nccl_broadcast_producer(
            self._weights(), self._nccl_group, src=0, post_iter_func=lambda named: named[1]
        )

    def save(self, directory: Path, with_optimizer: bool) -> None:
        """Copy the model, and the optimizer state if wanted, to the host memory of rank 0.

        A thread of rank 0 writes the copies to `directory` while the next commands run. It sends
        the message "written" at its end. The optimizer state is stored as whole tensors that do not
        depend on the number of ranks.
        """
        weights = dict(self._copies(self._adapter_masters() if self._adapter else self._weights()))
        optimizer = dict(self._copies(self._optimizer_tensors())) if with_optimizer else None
        if not self._is_rank0:
            return
        if not self._adapter:
            saved_names = self._model.state_dict().keys()
            weights |= {
                name: _host_copy(buffer)
                for name, buffer in self._model.named_buffers()
                if name in saved_names
            }
        metadata = optimizer_metadata(self._trainer.updates)
        threading.Thread(
            target=self._write_copies, args=(directory, weights, optimizer, metadata), daemon=True
        ).start()

    def _copies(
        self, named: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies in host memory on rank 0. Other ranks only take part in the gathering."""
        for name, tensor in named:
            if self._is_rank0:
                yield name, _host_copy(tensor)

    def _write_copies(
        self,
        directory: Path,
        weights: dict[str, torch.Tensor],
        optimizer: dict[str, torch.Tensor] | None,
        metadata: dict[str, str],
    ) -> None:
        """Write copies in Hugging Face format and as an optimizer file. Send the result."""
        problem = None
        try:
            if self._adapter:
                write_adapter(self._model, weights, self._adapter.base, directory)
            else:
                self._model.save_pretrained(directory, state_dict=weights)
            if optimizer is not None:
                write_tensors(
                    directory / OPTIMIZER_FILE, manifest_of(optimizer), optimizer.values(), metadata
                )
        except Exception as error:  # such as a full disk; safetensors has errors of its own
            problem = f"{type(error).__name__}: {error}"
        self._pipe.send("written", problem)

    def load(self, directory: Path) -> None:
        """Load a checkpoint of any learner, which may have had another number of ranks.

        Raise `LearnerError` if the directory holds no optimizer state, or no adapter of these
        layers if an adapter is trained.
        """
        saved, weights = optimizer_path(directory), self._saved_weights(directory)
        with safe_open(saved, "pt") as file:
            saved_names = set(file.keys())
            for name, parameter in self._trained():
                self._set_weight(parameter, weights[name])
                for kind in MOMENTS:
                    self._set_optimizer_tensor(parameter, kind, file.get_tensor(f"{kind}.{name}"))
                if self._trainer.stage:
                    master = (
                        file.get_tensor(f"weight.{name}")
                        if f"weight.{name}" in saved_names
                        else weights[name].float()
                    )
                    self._set_optimizer_tensor(parameter, "weight", master)
            metadata = file.metadata()
        self._trainer.updates = restore_schedule(self._trainer.schedule, metadata)

    def _saved_weights(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """Return the saved values of the trained parameters by name. An adapter is float32."""
        if self._adapter:
            saved_names = {id(p): name for name, p in adapter_parameters(self._model).items()}
            tensors = read_adapter(directory, saved_names.values(), torch.device("cpu"))
            return {name: tensors[saved_names[id(p)]] for name, p in self._trained()}
        dtype = getattr(torch, self._settings.compute.precision)
        loaded = load_model(directory, torch.device("cpu"), dtype, key=self._settings.model.key)
        return {name: parameter.detach() for name, parameter in loaded.named_parameters()}

    # Access to whole tensors that ZeRO has partitioned. At stage 3 a whole weight exists only while
    # it is gathered. From stage 1 on, the float32 weights and the moments are partitioned. All
    # ranks visit the tensors in the same order.

    @property
    def _state_kinds(self) -> tuple[str, ...]:
        """Names of the tensors saved for each weight, in addition to the model.

        "weight" is the float32 value; it is saved if the saved weight is rounded.
        """
        rounded = self._settings.compute.precision != "float32" and not self._adapter
        return ("weight", *MOMENTS) if rounded else MOMENTS

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and parameter of each weight that the optimizer updates."""
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each published weight.

        A tensor is valid until the next one. Without `Adapter.merged`, they are the matrices of the
        adapter. With it, the adapter is merged into the weights of the base model.
        """
        if self._adapter and not self._adapter.merged:
            for name, parameter in adapter_parameters(self._model).items():
                with self._gathered(parameter):
                    yield name, parameter.detach()
            return
        for name, parameter, layer in base_weights(self._model):
            with self._gathered(parameter, *(layer_parameters(layer) if layer else ())):
                yield name, merged_weight(parameter, layer)

    def _adapter_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield saved name and whole float32 matrix of the adapter."""
        for name, parameter in adapter_parameters(self._model).items():
            if parameter.dtype == torch.float32:
                with self._gathered(parameter):
                    yield name, parameter.detach()
            else:
                yield name, self._optimizer_tensor(parameter, "weight")

    def _gathered(
        self, *parameters: torch.nn.Parameter, modify: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which the parameters are whole.

        With `modify`, the value on rank 0 is distributed to all ranks at the end.
        """
        self._tick()
        if self._trainer.stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if modify else None
        )

    def _optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each part of the optimizer state."""
        for kind in self._state_kinds:
            for name, parameter in self._trained():
                yield f"{kind}.{name}", self._optimizer_tensor(parameter, kind)

    def _optimizer_tensor(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """Return a whole tensor of the optimizer state. `kind` is "weight" or one of `MOMENTS`."""
        self._tick()
        if not self._trainer.stage:
            return self._trainer.optimizer.state[parameter][kind]
        whole = (
            safe_get_full_fp32_param(parameter)
            if kind == "weight"
            else safe_get_full_optimizer_state(parameter, kind)
        )
        assert whole is not None
        return whole

    def _set_weight(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set the parameter to the whole tensor `value`."""
        with self._gathered(parameter, modify=True), torch.no_grad():
            if self._is_rank0 or self._trainer.stage < 3:
                parameter.copy_(value)

    def _set_optimizer_tensor(
        self, parameter: torch.nn.Parameter, kind: str, value: torch.Tensor
    ) -> None:
        """Set a part of the optimizer state to the whole tensor `value`."""
        self._tick()
        value = value.to(self._device)
        if not self._trainer.stage:
            self._trainer.optimizer.state[parameter][kind].copy_(value)
        elif self._trainer.stage < 3:
            set_whole = (
                (safe_set_full_fp32_param,)
                if kind == "weight"
                else (safe_set_full_optimizer_state, kind)
            )
            set_whole[0](parameter, value, *set_whole[1:])
        else:
            size = parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
            whole = torch.nn.functional.pad(
                value.flatten(), (0, size * self._ranks - value.numel())
            )
            part = whole[size * self._rank : size * (self._rank + 1)]
            if kind == "weight":
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, kind)

    def manifest(self) -> WeightManifest:
        """Return names, dtypes and shapes of the published weights, in the order of `_weights`."""
        if self._adapter and not self._adapter.merged:
            published: dict[str, torch.nn.Parameter] = adapter_parameters(self._model)
        else:
            published = {name: parameter for name, parameter, _ in base_weights(self._model)}
        return WeightManifest(
            tuple(published),
            tuple(str(p.dtype) for p in published.values()),
            tuple(tuple(getattr(p, "ds_shape", p.shape)) for p in published.values()),
        )

    def _write(
        self,
        path: Path,
        manifest: WeightManifest,
        named: Iterator[tuple[str, torch.Tensor]],
    ) -> int:
        """Write the tensors to `path` on rank 0 and return their checksum.

        The other ranks only take part in gathering the tensors and return 0.
        """
        tensors = (tensor for _, tensor in named)
        if self._is_rank0:
            return write_tensors(path, manifest, tensors)
        for _ in tensors:
            pass
        return 0


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


if __name__ == "__main__":
    main()
