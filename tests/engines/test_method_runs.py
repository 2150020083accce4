"""Whole runs of the methods of the field, with vLLM engines and DeepSpeed ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine_runs import DEEPSPEED, VLLM, metrics, train

for package in ("vllm", "deepspeed"):
    pytest.importorskip(
        package, reason=f"the extra crl[{package}] is not installed: make test-engines installs it"
    )

FULL = (
    "actor.profile=full", "extractor.profile=full", "rollout.groups=2", "rollout.group_size=4",
    "actor.minibatches=1", "actor.max_context_tokens=1024", "extractor.max_context_tokens=1024",
    "extractor.max_response_tokens=24", "extractor.merge_every=0", "extractor.batch=2",
    "tasks.room.max_turns=2", "tasks.room.max_response_tokens=16", "tasks.room.extra_turns=0",
    "tasks.room.eval.probe_places=0", "learner.precision=float32",
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(
    "method", ["complementary", "empo2", "gigpo", "grpo", "reflexion", "role_agent"]
)
def test_methods_run_with_vllm_and_ranks(method: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = [s for s in FULL if method not in ("gigpo", "grpo") or not s.startswith("extractor")]
    train(run, *VLLM, *DEEPSPEED, *sets, steps=3, method=method)
    assert [line["step"] for line in metrics(run, "train")] == [1, 2, 3]
