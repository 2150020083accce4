"""Whole runs of Role-Agent: bundled models, language models with scripted answers, random ones."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from crl.config.models import resolve_model
from crl.engines import torch as torch_engine
from crl.engines.torch import TorchEngine
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.types import Completion, Sampling
from support.documented_metrics import undocumented
from support.whole_runs import DETERMINISTIC, arguments, crl, episodes, metrics, untimed

SETS = (
    "rollout.groups=4", "rollout.group_size=2", "eval.probe_every=0", "tasks.room.eval.seen=2",
    "tasks.room.eval.unseen=2", "role_agent.replay_ratio=0.5",
)  # fmt: skip
BUNDLED = (*SETS, "role_agent.writer=extractor", "rollout.group_size=4")


def train(run: Path, *sets: str, steps: int = 3) -> list[dict[str, Any]]:
    """Train and return the lines of the bank."""
    result = crl(*arguments(run, "room", sets, steps, 0, "role_agent"))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert not undocumented(run)
    return metrics(run, "bank")


def drawn(run: Path) -> dict[int, tuple[Any, ...]]:
    """Return the task of each group."""
    return {t["group"]: (t["goal"], t["seed"], *sorted(t["params"].items())) for t in episodes(run)}


def replayed(run: Path) -> set[int]:
    """Return the groups whose task an earlier group has played."""
    tasks = drawn(run)
    return {group for group, task in tasks.items() if task in list(tasks.values())[:group]}


def test_training_tasks_with_similar_failures_return(tmp_path: Path) -> None:
    """The bundled extractor writes lessons about failures, whose mode is "other"."""
    run = tmp_path / "run"
    lines = train(run, *BUNDLED, *DETERMINISTIC, steps=4)
    groups = replayed(run)
    assert groups
    assert {t["split"] for t in episodes(run)} == {"train"}
    assert {t["condition"] for t in episodes(run)} == {"free"}
    by_step = [sum(4 * step <= group < 4 * step + 4 for group in groups) / 4 for step in range(4)]
    assert by_step[0] == 0
    assert [line["replay/share"] for line in lines[:4]] == by_step
    failed = [t for t in episodes(run) if not t["success"]]
    assert sum(line["perf/distil_calls"] for line in lines) == len(failed), "one for each failure"
    shares = [line["perf/distil_share"] for line in metrics(run, "train")]
    assert all(0 < share < 1 for share in shares), shares
    assert lines[-1]["failures/other"] == lines[-1]["bank/size"] > 0
    assert all("guided" not in key for line in metrics(run, "eval") for key in line)

    listed = json.loads(crl("bank", "failures", run, "--json").stdout)
    assert [mode["mode"] for mode in listed] == ["other"]
    refused = crl("eval", run, "--experience", "bank")
    assert "role_agent of the run shows its agents no experience" in refused.stderr


def test_a_resumed_run_draws_the_same_tasks(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(whole, *BUNDLED, *DETERMINISTIC, steps=4)
    train(parted, *BUNDLED, *DETERMINISTIC, steps=2)
    resumed = crl("resume", parted, "--steps", "4")
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert replayed(whole) - set(range(8)), "tasks return after the checkpoint"
    assert drawn(parted) == drawn(whole)
    assert [untimed(line) for line in metrics(parted, "train")] == [
        untimed(line) for line in metrics(whole, "train")
    ]


def test_without_replay_there_is_no_bank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, *SETS, "role_agent.replay_ratio=0", steps=1) == []
    assert not (run / "bank.sqlite").exists()


NOTE = """<reflection>
DOMINANT_TYPE: navigation_loop
DETAIL: The agent went to and fro.
CRITICAL_STEP: 1
CORE_LESSON: Follow the wall.
RETRIEVAL_QUERY: loop, wall
</reflection>"""


class Scripted(TorchEngine):
    """Engine of a language model that predicts a wall, and analyses failures."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None,
        rng: int | None = None,
    ) -> Completion:  # fmt: skip
        path = resolve_model("tiny-actor")
        tokenizer = load_tokenizer(path)
        renderer = ChatRenderer(tokenizer, stop_ids(path, tokenizer))
        prompt = renderer.decode(ids)
        if "You play a text game" in prompt:
            assert "predict what you will be shown next" in prompt, "in evaluations too"
            move = ("north", "east", "south", "west")[(rng or 0) % 4]
            text = f"<prediction>A wall.</prediction><answer>{move}</answer>"
        elif "=== Earlier tasks ===" in prompt:
            text = "INDEX: 1\nREASON: It has a wall."
        else:
            assert "- navigation_loop\n" in prompt
            text = NOTE if rng and rng % 3 else "I do not know."
        sampled = (*renderer.encode(text), renderer.stop_ids[0])
        return Completion(sampled, (-3.0,) * len(sampled), (self.version,) * len(sampled), "stop")


def language_model(path: Path) -> tuple[str, ...]:
    return (
        *SETS, f"actor.model={path}", "actor.max_context_tokens=4096",
        "extractor.max_response_tokens=256", "tasks.room.max_turns=2",
        "tasks.room.max_response_tokens=64", "embedder.model=hash",
    )  # fmt: skip


@pytest.mark.parametrize("retrieval", ["embedding", "model"])
def test_language_models_predict_and_analyse_failures(
    tmp_path: Path, random_qwen3: Path, monkeypatch: pytest.MonkeyPatch, retrieval: str
) -> None:
    monkeypatch.setattr(torch_engine, "TorchEngine", Scripted)
    run = tmp_path / "run"
    sets = (*language_model(random_qwen3), f"role_agent.retrieval={retrieval}", *DETERMINISTIC)
    lines = train(run, *sets)
    assert replayed(run)
    last = lines[-1]
    assert last["failures/navigation_loop"] == last["bank/size"] > 0
    assert last["dropped/no failure mode"] > 0
    failed = sum(not t["success"] for t in episodes(run))
    assert last["bank/size"] + last["dropped/no failure mode"] == failed
    steps = metrics(run, "train")
    assert all(0 < line["rollout/prediction/similarity"] < 1 for line in steps)
    assert all(line["rollout/prediction/missing"] == 0 for line in steps)
    assert all(0 < line["time/predictions"] < 60 for line in steps)
    assert all(line["env/failures"] == 0 and line["rollout/invalid_actions"] < 1 for line in steps)
    calls = sum(line["perf/distil_calls"] for line in lines)
    assert calls > failed if retrieval == "model" else calls == failed
    assert ("replay/unanswered" in last) == (retrieval == "model")
    listed = crl("bank", "failures", run, "--mode", "navigation_loop", "--json", "--limit", "0")
    notes = json.loads(listed.stdout)
    assert len(notes) == last["bank/size"]
    assert {view["note"]["lesson"] for view in notes} == {"Follow the wall."}


def test_a_language_model_with_random_weights(tmp_path: Path, random_qwen3: Path) -> None:
    """Rollouts, analyses and training overlap. No reply of the model can be used."""
    run = tmp_path / "run"
    train(run, *language_model(random_qwen3), "tasks.room.max_response_tokens=16")
    steps = metrics(run, "train")
    assert len(steps) == 3
    assert [line["rollout/prediction/missing"] for line in steps] == [1, 1, 1]
    assert [line["rollout/prediction/similarity"] for line in steps] == [0, 0, 0]
    assert steps[-1]["rollout/errors"] == 0


class Slow(Scripted):
    """Engine whose analyses take 3 seconds, unless they were cancelled before."""

    cancelled: ClassVar[Counter[int | None]] = Counter()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None,
        rng: int | None = None,
    ) -> Completion:  # fmt: skip
        if session is None and not self.cancelled[rng]:
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:
                self.cancelled[rng] += 1
                raise
        return await super().generate(ids, sampling, session=session, rng=rng)


def test_an_exchange_of_weights_interrupts_analyses(
    tmp_path: Path, random_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An analysis that is interrupted is repeated, so no failure is left out."""
    monkeypatch.setattr(torch_engine, "TorchEngine", Slow)
    monkeypatch.setattr(Slow, "cancelled", Counter())
    run = tmp_path / "run"
    lines = train(run, *language_model(random_qwen3), "tasks.room.max_turns=4", steps=4)
    steps = metrics(run, "train")
    assert steps[-1]["actor/version"] > 0, "weights were exchanged"
    assert 0 < sum(line["perf/sync_interrupted"] for line in steps) <= Slow.cancelled.total()
    failed = sum(not t["success"] for t in episodes(run))
    assert lines[-1]["bank/size"] + lines[-1]["dropped/no failure mode"] == failed


def test_errors_of_settings_are_one_line(tmp_path: Path) -> None:
    for sets, message in (
        (("bank.frozen=true",), "no failure could be added to the bank"),
        (("bank.scope=goal",), "failures with other goals would not be found"),
        (("bank.scope=variation",), "failures with other goals would not be found"),
        (
            ("bank.duplicate_similarity=0.9",),
            "similar failures of other tasks, which replay looks for",
        ),
        (("extractor.merge_every=5",), "a note belongs to one episode, so notes are not merged"),
        (("ask.enabled=true",), "role_agent does not support it with notes"),
        (("critic.enabled=true",), "role_agent does not support it with notes"),
        (("bank.evict_votes=3",), "a note is a text, without votes"),
        (("role_agent.retrieval=model",), "needs a language model that analyses failures"),
    ):
        refused = crl(*arguments(tmp_path / "no", "room", sets, 1, 0, "role_agent"))
        assert refused.exit_code == 2
        assert message in refused.stderr
