"""Tests that need no DeepSpeed: settings, messages, the missing extra, and sharing a minibatch."""

from __future__ import annotations

import importlib.util
import io
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.algo import micro_batches, rank_shares
from crl.config.load import load
from crl.errors import ConfigError
from crl.learners.deepspeed import (
    DeepSpeedLearner,
    RankSettings,
    frame,
    read_frame,
    split_minibatches,
)
from crl.modeling.memory import GpuAssignment
from crl.planning.machine_checks import require_learner
from crl.planning.plan import plan
from crl.run.models import NO_GPU, actor_model, open_role_learner
from crl.types import Minibatch, TokenTrace, TrainSample

# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["learner.ranks=2"],
            (
                'learner.ranks = 2: has no effect because learner.kind is "local". '
                "Add --set learner.kind=deepspeed"
            ),
        ),
        (["learner.zero=3"], "learner.zero = 3: has no effect"),
        (["learner.kind=local", "learner.offload=true"], "learner.offload = True: has no effect"),
        (["learner.kind=deepspeed", "learner.zero=4"], "learner.zero = 4"),
        (["learner.kind=deepspeed", "learner.ranks=0"], "learner.ranks = 0"),
        (
            ["learner.kind=deepspeed", "learner.zero=0", "learner.offload=true"],
            "learner.offload = True: requires ZeRO, but learner.zero is 0",
        ),
        (["learner.kind=deepsped"], "learner.kind = 'deepsped'"),
    ],
)
def test_contradictory_settings_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(["room"], sets=sets)
    assert message in str(raised.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "deepspeed" else real(name, *rest),
    )
    config = load(["room"], sets=["learner.kind=deepspeed"])
    with pytest.raises(
        ConfigError,
        match=r"learner\.kind = 'deepspeed': .* not installed\. Run pip install 'crl\[deepspeed\]'",
    ):
        require_learner(config)
    plan(config)
    require_learner(load(["room"]))


def test_the_plan_names_ranks_and_stage() -> None:
    sets = [
        "learner.kind=deepspeed",
        "learner.ranks=2",
        "learner.zero=3",
        "learner.device=cpu",
        "learner.activation_checkpointing=true",
    ]
    message = (
        "deepspeed on cpu, 1 CPU thread each; "
        "2 ranks of each model, ZeRO-3, activation checkpointing"
    )
    assert message in plan(load(["room"], sets=sets))


# ── sharing a minibatch ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lengths", "ranks", "shares"),
    [
        # 10 → first, 7 → second, 6 → second (7 < 10), 5 → first (10 < 13): 15 and 13 tokens
        (
            [10, 7, 6, 5],
            2,
            [[0, 3], [1, 2]],
        ),
        ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]),
        ([3, 9, 3], 2, [[1], [0, 2]]),
        # 8 | 6 | 5, then 4 → third, 2 → second, 1 → first: 9, 8 and 9 tokens
        (
            [4, 8, 2, 6, 5, 1],
            3,
            [[1, 5], [3, 2], [4, 0]],
        ),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_shares_by_hand(lengths: list[int], ranks: int, shares: list[list[int]]) -> None:
    assert rank_shares(lengths, ranks) == shares


@given(st.lists(st.integers(1, 4000), max_size=60), st.integers(1, 8))
def test_no_rank_exceeds_the_mean_by_more_than_one_sample(lengths: list[int], ranks: int) -> None:
    shares = rank_shares(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in share) for share in shares) <= sum(lengths) / ranks + max(
        lengths, default=0
    )


def test_ranks_have_similar_numbers_of_micro_batches() -> None:
    """Check episodes of 100 to 1,000 tokens on four ranks.

    Passes that the ranks make together must be of similar size.
    """
    lengths = [100 + 9 * (37 * i % 101) for i in range(128)]
    budget = 4096
    micro_batch_lists = [
        micro_batches([lengths[i] for i in share], budget) for share in rank_shares(lengths, 4)
    ]
    assert max(map(len, micro_batch_lists)) - min(map(len, micro_batch_lists)) <= 1


def test_shares_keep_the_values_of_the_whole_minibatch() -> None:
    def sample(length: int, weight: float) -> TrainSample:
        columns: dict[str, Any] = {"ids": (1,) * length, "mask": (0,) + (1,) * (length - 1)}
        return TrainSample(
            TokenTrace(**columns, logprobs=(0.0,) * length, versions=(0,) * length), 1.0, weight
        )

    whole = [
        Minibatch((sample(4, 0.1), sample(9, 0.2), sample(6, 0.7)), 40),
        Minibatch((sample(3, 1.0),), 2),
    ]
    first, second = split_minibatches(whole, 2)
    assert first == [Minibatch((whole[0].samples[1],), 40), whole[1]]
    assert second == [Minibatch((whole[0].samples[2], whole[0].samples[0]), 40), Minibatch((), 2)]
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        rank_shares([1], 0)


# ── settings of the ranks ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RankSettings, int, dict[str, Any]]]:
    """Return the arguments that learners are started with. No ranks are started."""
    calls: list[tuple[RankSettings, int, dict[str, Any]]] = []

    class Learner:
        async def aclose(self) -> None:
            pass

    async def start(settings: RankSettings, ranks: int, **options: Any) -> Learner:
        calls.append((settings, ranks, options))
        return Learner()

    monkeypatch.setattr(DeepSpeedLearner, "start", start)
    return calls


async def start_learner(*sets: str, assigned: GpuAssignment = NO_GPU) -> None:
    config = load(["room"], sets=["learner.kind=deepspeed", "learner.ranks=2", *sets])
    role = actor_model(config)
    gpus, loss = {"actor learner": assigned}, None
    async with AsyncExitStack() as stack:
        await open_role_learner(config, gpus, role, loss, stack)  # pyright: ignore


async def test_ranks_on_the_cpu(started: list[Any]) -> None:
    await start_learner("learner.device=cpu", "learner.activation_checkpointing=true")
    await start_learner(
        "learner.device=cpu", "learner.precision=bfloat16", "engine.kind=vllm", "engine.replicas=3"
    )
    (first, ranks, options), (second, _, others) = started
    assert (first.compute.device, first.compute.precision) == ("cpu", "float32")
    assert (first.train.activation_checkpointing, ranks) == (True, 2)
    assert (second.compute.precision, second.train.activation_checkpointing) == ("bfloat16", False)
    assert (options["gpus"], options["receivers"], others["receivers"]) == ((), 0, 0)


async def test_ranks_use_the_gpus_of_the_plan(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    nccl = (
        "engine.kind=vllm",
        "engine.replicas=3",
        "engine.tensor_parallel=2",
        "engine.transfer=nccl",
    )
    await start_learner(*nccl, assigned=GpuAssignment(("GPU-a", "GPU-b")))
    settings, _, options = started[0]
    assert (settings.compute.device, settings.compute.precision) == ("cuda", "float32"), (
        "the bundled models are in float32"
    )
    assert (options["gpus"], options["receivers"]) == (("GPU-a", "GPU-b"), 6)
    with pytest.raises(
        ConfigError,
        match=r"learner\.device = 'auto': torch finds a GPU, but nvidia-smi reports no GPU",
    ):
        await start_learner()


async def test_unsupported_settings_of_ranks_are_rejected(started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.zero = 0: keeps no float32 weights"):
        await start_learner("learner.device=cpu", "learner.precision=bfloat16", "learner.zero=0")
    with pytest.raises(ConfigError, match=r"engine\.transfer = 'nccl': NCCL sends from GPU to GPU"):
        await start_learner("learner.device=cpu", "engine.kind=vllm", "engine.transfer=nccl")
    assert not started


def test_a_large_message_is_sent_in_small_pieces() -> None:
    message = [(tuple(range(i, i + 1_000)), -0.5 * i) for i in range(300)]
    pieces = frame(message)
    assert max(map(len, pieces)) < 1 << 17 < sum(map(len, pieces))
    assert read_frame(io.BytesIO(b"".join(pieces))) == message
