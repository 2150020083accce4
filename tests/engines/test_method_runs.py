"""Whole runs of the methods of the field, with vLLM engines and DeepSpeed ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from crl.records.reader import read_episodes
from support.engine_runs import DEEPSPEED, VLLM, metrics, train
from support.paths import ROOT

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
    f"tasks.room.env={ROOT}/tests/support/letters.py:SPEC",
)  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [
        "role_agent",  # has a bank, and the advantages of gigpo
        *(
            pytest.param(method, marks=pytest.mark.soak)
            for method in ("complementary", "empo2", "gigpo", "grpo", "reflexion")
        ),
    ],
)
def test_methods_run_with_vllm_and_ranks(method: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = [s for s in FULL if method not in ("gigpo", "grpo") or not s.startswith("extractor")]
    train(run, *VLLM, *DEEPSPEED, *sets, steps=3, method=method)
    steps = metrics(run, "train")
    assert [line["step"] for line in steps] == [1, 2, 3]
    if method == "reflexion":
        return
    updates = [line for line in steps if line["actor/updates"]]
    assert len(updates) == steps[-1]["actor/version"] > 0
    assert all(line["actor/grad_norm"] > 0 for line in updates)


@pytest.mark.soak
@pytest.mark.parametrize("old", ["with_tips", "without_tips"])
def test_empo2_is_trained_off_policy_with_vllm_and_ranks(old: str, tmp_path: Path) -> None:
    """Every step has memory and is trained off-policy."""
    run = tmp_path / "run"
    sets = (
        "empo2.memory_share=1", "empo2.off_policy_share=1", f"empo2.off_policy_old={old}",
        "tasks.room.stream.places=1", "tasks.room.stream.permanent=1",
        "retrieval.min_similarity=-1", "rollout.max_staleness=0",
    )  # fmt: skip
    train(run, *VLLM, *DEEPSPEED, *FULL, *sets, steps=3, method="empo2")
    guided = {t.address.step for t in read_episodes(run) if t.used}
    assert guided, "tips were shown"
    lines = [line for line in metrics(run, "train") if line["step"] - 1 in guided]
    updates = [line for line in lines if line["actor/updates"]]
    assert updates, "the actor was trained on stripped episodes"
    if old == "with_tips":  # the prompts of the old log-probs differ
        assert any(line["actor/approx_kl"] > 1e-4 for line in updates)
