"""Whole runs with actor-critic: real parts in the room, with scripted verdicts.

The verdicts are scripted because every kind of verdict must occur.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crl.config import load
from crl.config.models import resolve_model
from crl.engines.torch import TorchEngine
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.planning import tasks
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.rollout.waves import LockstepSampler, SequentialSampler
from crl.types import Completion, Outcome, RolloutPlan, Sampling, Task, Trajectory
from support.complementary_runs import SIZES, address, log, manifest, rows, train
from support.whole_runs import (
    DETERMINISTIC,
    crl,
    episode_files,
    episodes,
    lines,
    metrics,
    one_line,
    untimed,
)

CRITIC = ("critic.enabled=true", "critic.warmup=2")
VERDICTS = ("accept", "refine from the start go east.", "reject", "north")
SCORES = {"accept": 1.0, "refine": 0.5}


def renderer() -> ChatRenderer:
    path = resolve_model("tiny-actor")
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


class ScriptedVerdicts:
    """Scripted verdicts of the actor, and a record of its sessions and prompts.

    In training, the verdicts are given in turn, so that each kind occurs. Elsewhere, a verdict
    depends on the draw alone, so that `crl eval` repeats it.
    """

    def __init__(self) -> None:
        self.critiques: list[tuple[str, str]] = []
        self.sessions: set[str] = set()
        self._in_turn = itertools.cycle(VERDICTS)
        self._play, self._renderer = TorchEngine.generate, renderer()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        script = self

        async def generate(
            engine: TorchEngine,
            ids: Sequence[int],
            sampling: Sampling,
            *,
            session: str | None = None,
            rng: int | None = None,
        ) -> Completion:
            script.sessions.add(session or "")
            if "/critic/" not in (session or ""):
                return await script._play(engine, ids, sampling, session=session, rng=rng)
            script.critiques.append((session or "", script._renderer.decode(ids)))
            verdict_ids = script._renderer.encode(script._verdict(session or "", rng))
            sampled = (*verdict_ids, sampling.stop_ids[0])[: sampling.max_tokens]
            assert len(sampled) == len(verdict_ids) + 1, (
                "the token limit of the preset allows a verdict"
            )
            return Completion(
                sampled, (-1.0,) * len(sampled), (engine.version,) * len(sampled), "stop"
            )

        monkeypatch.setattr(TorchEngine, "generate", generate)
        # It hides the session from the engine.
        monkeypatch.setattr(SequentialSampler, "generate", LockstepSampler.generate)

    def _verdict(self, session: str, rng: int | None) -> str:
        return (
            next(self._in_turn)
            if session.startswith("train/")
            else random.Random(rng).choice(VERDICTS)
        )


def run_with_verdicts(run: Path, *sets: str, steps: int = 5) -> ScriptedVerdicts:
    script = ScriptedVerdicts()
    with pytest.MonkeyPatch.context() as monkeypatch:
        script.patch(monkeypatch)
        train(run, *CRITIC, *sets, steps=steps)
    return script


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptedVerdicts]:
    run = tmp_path_factory.mktemp("judged") / "run"
    return run, run_with_verdicts(run, *DETERMINISTIC, "run.eval_every=3")


@pytest.fixture(scope="module")
def concurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptedVerdicts]:
    run = tmp_path_factory.mktemp("background") / "run"
    # Step 4 begins when step 1 is distilled.
    return run, run_with_verdicts(
        run, "rollout.max_staleness=1", "retrieval.per=rollout", "bank.queue_size=16", steps=6
    )


@pytest.fixture(params=["judged", "concurrent"])
def either(request: pytest.FixtureRequest) -> tuple[Path, ScriptedVerdicts]:
    return request.getfixturevalue(request.param)


def verdicts(t: dict[str, Any]) -> list[str]:
    return [use["verdict"] for use in t["used"] + t["rejected"]]


def test_all_verdicts_occur_only_in_guided_episodes(either: tuple[Path, ScriptedVerdicts]) -> None:
    run, script = either
    played = episodes(run)
    assert Counter(v for t in played for v in verdicts(t)).keys() == {"accept", "refine", "reject"}
    for t in played:
        shown = [s["text"] for s in t["segments"] if s["origin"] == "experience"]
        assert len(shown) == len(t["used"])
        assert verdicts(t) != ["refine"] or shown == ["from the start go east."]
        assert t["condition"] == "guided" or not (t["used"] or t["rejected"])
        assert "judge" not in script._renderer.decode(t["ids"]), "critiques are not trained on"


def test_the_members_of_a_group_share_one_verdict(either: tuple[Path, ScriptedVerdicts]) -> None:
    run, script = either
    shared: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for t in episodes(run):
        for use in t["used"] + t["rejected"]:
            text = next((s["text"] for s in t["segments"] if s["origin"] == "experience"), "")
            shared[t["group"], f"{use['uid']}@{use['version']}"].add(f"{use['verdict']} {text}")
    assert shared
    assert all(len(found) == 1 for found in shared.values())
    trained = [session for session, _ in script.critiques if session.startswith("train/")]
    assert len(trained) == len(set(trained)), "one critique for each experience and group"
    if run.parent.name.startswith("judged"):
        assert len(trained) == len(shared)


def test_credit_by_hand(judged: tuple[Path, ScriptedVerdicts]) -> None:
    """Compare the credits in the log and the totals of the units with the episodes.

    The log holds r = ±1 and the verdict. The totals of a unit count r alone and ignore rejected
    uses.
    """
    run, _ = judged
    found = {
        (address(t), use["uid"]): (use["verdict"], 1.0 if t["success"] else -1.0)
        for t in episodes(run)
        for use in t["used"]
    }
    rejected = {
        (address(t), use["uid"]): ("reject", None) for t in episodes(run) for use in t["rejected"]
    }
    given = {
        (origin, data["uid"]): (data["verdict"], data.get("reward"))
        for origin, data in log(run / "bank.sqlite", "credit")
    }
    assert given == found | rejected
    assert rejected
    outcomes: defaultdict[str, list[float]] = defaultdict(list)
    for (_, uid), (_, outcome) in found.items():
        outcomes[uid].append(outcome)
    credited = {
        uid: (n, total)
        for uid, n, total in rows(
            run / "bank.sqlite", "SELECT uid, credited, credit FROM units WHERE credited"
        )
    }
    assert credited == {uid: (len(of), sum(of)) for uid, of in outcomes.items()}


def test_rewards_of_the_extractor(tmp_path: Path) -> None:
    """Compare the pending rewards with rewards computed from the episodes.

    The extractor is not trained here, so every reward is still pending.
    """
    run = tmp_path / "run"
    run_with_verdicts(
        run, *DETERMINISTIC, "extractor.train=false", "extractor.baseline=batch", steps=3
    )
    expected: defaultdict[str, list[float]] = defaultdict(list)
    for t in episodes(run):
        for use in t["used"]:
            expected[use["uid"]].append(SCORES[use["verdict"]] + (1.0 if t["success"] else -1.0))
        for use in t["rejected"]:
            expected[use["uid"]].append(0.0)
    pending = rows(
        run / "bank.sqlite",
        "SELECT uid, pending_count, pending_sum FROM units WHERE ready IS NOT NULL AND version > 0",
    )
    assert {uid: (n, total) for uid, n, total in pending} == {
        uid: (len(of), sum(of)) for uid, of in expected.items()
    }


def test_metrics_of_the_critic(judged: tuple[Path, ScriptedVerdicts]) -> None:
    run, _ = judged
    found = [line for line in metrics(run, "train") if "critic/critiques" in line]
    assert len(found) == 4, "the first step has no experience to judge"
    for line in found:
        assert line["critic/accept"] + line["critic/refine"] + line[
            "critic/reject"
        ] == pytest.approx(1)
        assert line["critic/malformed"] <= line["critic/accept"]
        assert line["perf/critic_p50_ms"] > 0
        uses = [t for t in episodes(run) if t["step"] == line["step"] and t["used"]]
        assert line.get("rollout/success/used") == (
            pytest.approx(sum(t["success"] for t in uses) / len(uses)) if uses else None
        )
    assert any(line["critic/malformed"] for line in found)


def test_the_warm_up_comes_first_and_does_not_advance_the_stream(
    judged: tuple[Path, ScriptedVerdicts], tmp_path: Path
) -> None:
    run, script = judged
    (line,) = metrics(run, "warmup")
    assert (lines(run / "metrics.jsonl")[0]["kind"], line["step"], line["warmup/episodes"]) == (
        "warmup",
        0,
        2 * 4 * 4,
    )
    assert 0 <= line["warmup/room/success"] <= 1
    warm = {session for session in script.sessions if session.startswith("warmup/")}
    assert len(warm) == line["warmup/episodes"]
    config = load(["room"], sets=[*SIZES, *CRITIC])
    tasks_drawn = tasks.train_stream(config, tasks.specs(config)).draw(4 * 5)
    goals = {t["group"]: t["segments"][0]["text"] for t in episodes(run)}
    assert [goals[group] for group in range(20)] == [task.goal for task in tasks_drawn]
    assert all(origin.startswith("run/") for origin, _ in log(run / "bank.sqlite", "submit")), (
        "the warm-up is not distilled"
    )


def test_a_failed_warm_up_is_noted_and_the_run_continues(
    tmp_path: Path,
) -> None:
    play = EpisodeRunner.play

    async def broken(
        runner: EpisodeRunner, key: EpisodeKey, task: Task, plan: RolloutPlan
    ) -> Trajectory:
        played = await play(runner, key, task, plan)
        return (
            Trajectory(task, key.address, "free", outcome=Outcome(error="env: lost"))
            if key.purpose == "warmup"
            else played
        )

    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EpisodeRunner, "play", broken)
        train(run, *DETERMINISTIC, *CRITIC, steps=1)
    (line,) = metrics(run, "warmup")
    assert line["warmup/episodes"] == 0
    assert "warmup/room/success" not in line
    assert "all warm-up episodes failed with an error" in (run / "log.txt").read_text("utf-8")
    assert metrics(run, "train")


def test_the_critic_gets_the_success_rate_without_experience(
    judged: tuple[Path, ScriptedVerdicts],
) -> None:
    """Check the success rate without experience that the judging actor gets.

    It is computed from the warm-up and the free episodes.
    """
    run, script = judged
    rates = manifest(run, 5)["state"]["success_rates"]
    free = [t["success"] for t in episodes(run) if t["condition"] == "free"]
    assert rates["tasks"]["room"][-len(free) :] == "".join("1" if won else "0" for won in free)
    assert len(rates["tasks"]["room"]) == min(64, len(free) + 32)
    assert all("\nwon " in prompt and prompt.count("judge") == 1 for _, prompt in script.critiques)


def test_the_same_seed_gives_the_same_verdicts(
    judged: tuple[Path, ScriptedVerdicts], tmp_path: Path
) -> None:
    again = tmp_path / "again"
    script = run_with_verdicts(again, *DETERMINISTIC, "run.eval_every=3")
    assert script.critiques == judged[1].critiques, "in the same order"
    assert list(map(untimed, lines(again / "metrics.jsonl"))) == list(
        map(untimed, lines(judged[0] / "metrics.jsonl"))
    )
    assert episode_files(again) == episode_files(judged[0])


def test_evaluations_judge_and_crl_eval_repeats_them(
    judged: tuple[Path, ScriptedVerdicts], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = judged
    purposes = {session.split("/")[0] for session, _ in before.critiques}
    assert purposes == {"train", "eval", "online"}, "the advice of the probe is not judged"
    script = ScriptedVerdicts()
    script.patch(monkeypatch)
    assert crl("eval", run).exit_code == 0
    assert not any(session.startswith("warmup/") for session in script.sessions)
    repeated = len(script.critiques)
    assert [prompt for _, prompt in script.critiques] == [
        p for s, p in before.critiques if not s.startswith("train/")
    ][-repeated:]


def test_the_bundled_actor_judges(tmp_path: Path) -> None:
    """Check that a run completes with the verdicts of the bundled actor, valid or not."""
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, *CRITIC, steps=2)
    assert metrics(run, "train")[1]["critic/critiques"] > 0


def test_the_critic_needs_a_method_with_experience(tmp_path: Path) -> None:
    result = crl(
        "train",
        "--tasks",
        "room",
        "--method",
        "grpo",
        "--set",
        "critic.enabled=true",
        "--run-dir",
        tmp_path / "run",
    )
    assert result.exit_code == 2
    assert one_line(result) == (
        "error: critic.enabled = True: the method grpo has no experience for the actor to judge. "
        "Leave it out, or choose a method with a bank.\n"
    )
