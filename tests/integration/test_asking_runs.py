"""Whole runs with search_and_ask.

Real models play, distil and learn. Only the questions and the answers to them are scripted.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crl.config.models import resolve_model
from crl.engines import torch as torch_engine
from crl.engines.torch import TorchEngine
from crl.errors import RolloutError
from crl.methods.parts.asking import COMPACT_NO_RESULT, COMPACT_OFFER
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.rollout.waves import LockstepSampler, SequentialSampler
from crl.types import Completion, Sampling, Segment
from support.complementary_runs import dump, rows
from support.documented_metrics import undocumented
from support.whole_runs import (
    DETERMINISTIC,
    arguments,
    contents,
    crl,
    episode_files,
    episodes,
    equal_weights,
    metrics,
    one_line,
    untimed,
)

SIZES = (
    "rollout.groups=4", "rollout.group_size=4", "extractor.batch=4", "eval.probe_every=0",
    "tasks.room.stream.places=4", "tasks.room.stream.permanent=2",
    "tasks.room.eval.seen=4", "tasks.room.eval.unseen=4", "tasks.room.eval.online_places=1",
    "tasks.room.eval.probe_places=4",
    "ask.enabled=true",
)  # fmt: skip
STEPS = 3
REFINED = "from here go south."
ANSWER_NEXT = "<|im_start|>assistant\n"


@cache
def chat_renderer(role: str = "actor") -> ChatRenderer:
    path = resolve_model(f"tiny-{role}")
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


class ScriptedQuestions(TorchEngine):
    """Engine that samples normally and then replaces some completions with scripted texts.

    An agent that may ask does so at its first decision. Every question is answered with a
    refinement. If `fails` is set, questions fail with an error. If `hangs` is set, questions are
    never answered.
    """

    fails = hangs = False

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        renderer = chat_renderer("actor" if session else "extractor")
        text = renderer.decode(ids)
        asking = session and f"\n{COMPACT_OFFER}\n" in text and text.count(ANSWER_NEXT) == 1
        answering = not session and text.endswith(f"\nask<|im_end|>\n{ANSWER_NEXT}")
        if answering and self.fails:
            raise RolloutError("engine", "no")
        if answering and self.hangs:
            await asyncio.Event().wait()
        sampled = await super().generate(ids, sampling, session=session, rng=rng)
        if asking:
            return self._completion(renderer, "ask")
        return (
            self._completion(renderer, f'[{{"op":"refine","text":"{REFINED}"}}]')
            if answering
            else sampled
        )

    def _completion(self, renderer: ChatRenderer, text: str) -> Completion:
        ids = (*renderer.encode(text), renderer.stop_ids[0])
        return Completion(ids, (-0.5,) * len(ids), (self.version,) * len(ids), "stop")


class FailingQuestions(ScriptedQuestions):
    fails = True


class HangingQuestions(ScriptedQuestions):
    hangs = True


def train(
    run: Path, *sets: str, engine: type[TorchEngine] = ScriptedQuestions, steps: int = STEPS
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "TorchEngine", engine)
        result = crl(*arguments(run, "room", (*SIZES, *sets), steps, 0, "complementary"))
    assert result.exit_code == 0, result.output + str(result.exception)
    assert result.stderr == ""
    assert undocumented(run) == set()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("deterministic") / "run"
    train(run, *DETERMINISTIC)
    return run


@pytest.fixture(scope="module")
def concurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("background") / "run"
    # Lessons that are distilled in the background arrive late.
    train(run, "rollout.max_staleness=1", "bank.queue_size=16", steps=3 * STEPS)
    return run


@pytest.fixture(params=["done", "concurrent"])
def either(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_guided_agents_ask_and_get_replies(either: Path) -> None:
    replies = Counter()
    for t in episodes(either):
        origins = [s["origin"] for s in t["segments"]]
        if t["condition"] == "free":
            continue
        assert (
            origins.count("tool_spec")
            == origins.count("tool_call")
            == origins.count("tool_result")
            == 1
        ), "one question is the limit"
        (reply,) = (s["text"] for s in t["segments"] if s["origin"] == "tool_result")
        replies[reply] += 1
        hows = [use["how"] for use in t["used"]]
        assert hows[-1:] == (["ask"] if reply == REFINED else [])
        assert t["turns"] <= 4
    assert set(replies) == {REFINED, COMPACT_NO_RESULT}, "the bank is empty at first"
    last = metrics(either, "train")[-1]
    assert last["rollout/asks"] == 1
    assert last["rollout/asks/refined"] == last["rollout/asks/found"] > 0
    assert {"perf/refine_p50_ms", "perf/refine_p95_ms"} <= set().union(*metrics(either, "bank"))


def test_free_episodes_have_no_tool_and_no_replies(either: Path) -> None:
    """Check the prompts of free episodes token by token."""
    renderer = chat_renderer()
    for t in episodes(either):
        if t["condition"] == "free":
            assert {s["origin"] for s in t["segments"]} <= {"task", "env", "policy"}
            prompt = renderer.decode(t["ids"][: t["mask"].index(1)])
            assert prompt == renderer.text([Segment(**s) for s in t["segments"]][:2])
            assert COMPACT_OFFER not in renderer.decode(t["ids"])
            assert REFINED not in renderer.decode(t["ids"])


def test_the_tool_call_is_trained_and_the_reply_is_not(either: Path) -> None:
    renderer = chat_renderer()
    for t in episodes(either):
        if t["condition"] == "guided":
            sampled = renderer.decode([i for i, m in zip(t["ids"], t["mask"], strict=True) if m])
            assert sampled.startswith("ask<|im_end|>")
            assert REFINED not in sampled


def test_refinements_earn_credit_and_are_trained(either: Path) -> None:
    bank = either / "bank.sqlite"
    earned: Counter[str] = Counter()
    for t in episodes(either):
        for use in t["used"]:
            if use["how"] == "ask":
                assert (
                    use["generation"] == f"run/train/{t['step'] - 1}/{t['group']}/{t['member']}/1"
                )
                earned[use["generation"]] += 1 if t["success"] else -1
    assert earned
    found = {
        uid: credit
        for uid, credit in rows(
            bank,
            (
                "SELECT uid, credit FROM units WHERE uid LIKE 'run/train/%' AND version = 1 "
                "AND credited"
            ),
        )
    }
    assert found == dict(earned)
    assert not rows(bank, "SELECT 1 FROM entries WHERE uid LIKE 'run/train/%'"), (
        "refinements are not entries"
    )
    trained = {
        origin
        for (origin,) in rows(
            bank, "SELECT DISTINCT origin FROM log WHERE kind = 'train' AND op = 1"
        )
    }
    assert trained & earned.keys(), "the extractor was trained on refinements"
    assert max(line["extractor/updates"] for line in metrics(either, "extractor")) > 0


def test_refinements_are_shown_to_the_extractor(either: Path) -> None:
    prompts = rows(
        either / "bank.sqlite", "SELECT prompt FROM generations WHERE id NOT LIKE 'run/train/%'"
    )
    texts = [
        chat_renderer("extractor").decode(list(memoryview(prompt).cast("i")))
        for (prompt,) in prompts
    ]
    assert any(re.search(rf"hint \d {REFINED}", text) for text in texts)


def test_runs_are_reproducible_and_evaluations_change_nothing(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = tmp_path / "watched"
    asked_in: list[str] = []

    def recording(generate: Callable[..., Awaitable[Completion]]) -> Callable[..., Any]:
        async def recorded(self, ids, sampling, *, session, rng):
            found = await generate(self, ids, sampling, session=session, rng=rng)
            # Without an offer, the tiny actor sometimes samples the same text.
            offered = f"\n{COMPACT_OFFER}\n" in chat_renderer().decode(ids)
            if offered and chat_renderer().decode(found.ids).startswith("ask<"):
                asked_in.append(session.split("/")[0])
            return found

        return recorded

    for sampler in (LockstepSampler, SequentialSampler):
        monkeypatch.setattr(sampler, "generate", recording(sampler.generate))
    train(watched, *DETERMINISTIC, "run.eval_every=1", "eval.probe_every=1")
    assert set(asked_in) == {"train", "eval", "online"}, "and not the advice probe"
    assert episode_files(watched) == episode_files(done)
    assert dump(watched / "bank.sqlite") == dump(done / "bank.sqlite")
    for kind in ("train", "extractor", "bank"):
        assert list(map(untimed, metrics(watched, kind))) == list(map(untimed, metrics(done, kind)))
    assert untimed(metrics(watched, "eval")[-1]) == untimed(metrics(done, "eval")[-1])
    for role in ("actor", "extractor"):
        assert equal_weights(
            watched / f"checkpoints/{STEPS}/{role}", done / f"checkpoints/{STEPS}/{role}"
        )


@pytest.mark.parametrize("engine", [FailingQuestions, HangingQuestions])
def test_without_a_refinement_the_agent_gets_the_retrieved_experience(
    done: Path, tmp_path: Path, engine: type[TorchEngine]
) -> None:
    run = tmp_path / "run"
    source = f"bank.init={done / 'bank.sqlite'}"
    train(run, "rollout.max_staleness=0", "ask.timeout=0.02", source, engine=engine, steps=1)
    texts = {text for (text,) in rows(run / "bank.sqlite", "SELECT text FROM entries")}
    unrefined = [
        t for t in episodes(run) if [use["how"] for use in t["used"]] == ["start", "ask_unrefined"]
    ]
    assert unrefined
    for t in unrefined:
        assert {s["text"] for s in t["segments"] if s["origin"] == "tool_result"} <= texts
    assert metrics(run, "bank")[-1]["refine/failed"] == len(unrefined)
    assert metrics(run, "train")[0]["rollout/asks/refined"] == 0


def test_eval_asks_and_changes_no_file(done: Path) -> None:
    before = contents(done)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "TorchEngine", ScriptedQuestions)
        result = crl("eval", done)
    assert (result.exit_code, result.stderr) == (0, "")
    assert contents(done) == before


def test_a_bank_with_refinements_starts_another_run(done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, f"bank.init={done / 'bank.sqlite'}", steps=1)
    (run_name,) = {
        use["generation"].split("/")[0]
        for t in episodes(run)
        for use in t["used"]
        if use["how"] == "ask"
    }
    assert run_name.startswith("run")
    assert run_name != "run"
    frozen = tmp_path / "frozen"
    train(frozen, *DETERMINISTIC, f"bank.init={done / 'bank.sqlite'}", "bank.frozen=true", steps=1)
    assert any(use["how"] == "ask" for t in episodes(frozen) for use in t["used"])


class Scripted(TorchEngine):
    """Engine that serves two language models with scripted completions.

    The agent asks once, after a thought.
    """

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        text = chat_renderer().decode(ids)
        if session:
            has_advice = "search_and_ask" not in text or "You are by the wall." in text
            completion = (
                "<answer>north</answer>"
                if has_advice
                else "<think>Dark.</think><search_and_ask>Where are the stairs?</search_and_ask>"
            )
        elif "=== The agent's question ===\n  Where are the stairs?" in text:
            completion = '[{"op": "refine", "text": "You are by the wall. Follow it."}]'
        else:
            completion = '[{"op": "add", "text": "The stairs are by the wall."}]'
        sampled = (*chat_renderer().encode(completion), chat_renderer().stop_ids[0])
        return Completion(sampled, (-6.0,) * len(sampled), (self.version,) * len(sampled), "stop")


def test_language_models_ask_and_answer(tmp_path: Path, random_qwen3: Path) -> None:
    run, prompt_file = tmp_path / "run", tmp_path / "ask.txt"
    prompt_file.write_text(
        "You may <search_and_ask>{{question}}</search_and_ask>, {limit} times.\n"
    )
    sets = (
        f"actor.model={random_qwen3}", "actor.max_context_tokens=2048",
        f"extractor.model={random_qwen3}", "extractor.max_context_tokens=4096",
        "extractor.max_response_tokens=128", "extractor.merge_every=0", "tasks.room.max_turns=2",
        "tasks.room.max_response_tokens=64", "rollout.groups=2", "tasks.room.eval.seen=0",
        "tasks.room.eval.unseen=0", "tasks.room.eval.online_places=0", "ask.limit=2",
        f"prompts.ask={prompt_file}",
    )  # fmt: skip
    train(run, *DETERMINISTIC, *sets, engine=Scripted, steps=2)
    second = [t for t in episodes(run) if t["step"] == 2]
    for t in second:
        origins = [s["origin"] for s in t["segments"]]
        if t["condition"] == "free":
            assert set(origins) == {"task", "env", "policy"}
            continue
        assert origins == [
            "task", "task", "experience", "tool_spec", "env", "tool_call", "tool_result", "policy",
            "env", "policy", "env"
        ]  # fmt: skip
        assert (
            t["segments"][3]["text"]
            == "You may <search_and_ask>{question}</search_and_ask>, 2 times."
        )
        assert t["segments"][6]["text"].startswith("Advice from earlier episodes")
        assert [use["how"] for use in t["used"]] == ["start", "ask"]
        assert t["turns"] == 2
    prompts = [
        chat_renderer().decode(list(memoryview(p).cast("i")))
        for (p,) in rows(run / "bank.sqlite", "SELECT prompt FROM generations")
    ]
    question_prompts = [text for text in prompts if "=== The agent's question ===" in text]
    assert len(question_prompts) == 4
    assert all(
        "agent asks]\n  <think>Dark.</think><search_and_ask>Where are the stairs?" in text
        for text in question_prompts
    )
    assert all(
        "=== Advice that was found ===\n  The stairs are by the wall.\n" in text
        for text in question_prompts
    )


def test_user_errors_are_one_line(tmp_path: Path) -> None:
    def refused(method: str, *sets: str) -> str:
        result = crl(*arguments(tmp_path / "run", "room", sets, 1, 0, method))
        assert result.exit_code == 2
        return one_line(result)

    assert refused("grpo", "ask.enabled=true") == (
        "error: ask.enabled = True: has no effect because the method grpo has no bank to ask. "
        "Leave it out, or choose another method.\n"
    )
    prompt_file = tmp_path / "mine.txt"
    prompt_file.write_text("Ask {limit} times.")
    assert "prompts.ask = " in refused(
        "complementary", f"prompts.ask={prompt_file}", "ask.enabled=true"
    )
    assert "is not used by any model of this run" in refused(
        "complementary", f"prompts.ask={prompt_file}", "ask.enabled=true"
    )
