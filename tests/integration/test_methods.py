"""Whole runs of the methods of the field, with the bundled models."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crl.config import load
from crl.embedders.hash import HashEmbedder
from crl.manager.keys import STATE_KEYS
from crl.methods.parts.memory import MemorySteps
from crl.records.reader import read_episodes
from crl.rollout.rerender import Rerenderer
from crl.run import models
from crl.run.halves.commands import play_episodes
from crl.types import BEHAVIOUR, STEP_START, Trajectory
from support.documented_metrics import undocumented
from support.paths import ROOT
from support.whole_runs import DETERMINISTIC, arguments, crl, metrics

SETS = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "tasks.room.eval.seen=4",
    "tasks.room.eval.unseen=4",
    *DETERMINISTIC,
)


def trained(run: Path, method: str, *sets: str, steps: int = 2) -> list[dict[str, Any]]:
    """Return the lines of the training steps of a run, without times."""
    result = crl(*arguments(run, "room", (*SETS, *sets), steps, 0, method))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return [
        {key: value for key, value in line.items() if not key.startswith(("time", "perf/"))}
        for line in metrics(run, "train")
    ]


@pytest.mark.soak
def test_gigpo_is_grpo_with_step_advantages(tmp_path: Path) -> None:
    grpo = trained(tmp_path / "grpo", "grpo")
    without = trained(tmp_path / "without", "gigpo", "gigpo.step_weight=0")
    gigpo = trained(tmp_path / "gigpo", "gigpo")
    assert without == grpo
    assert gigpo[0]["rollout/reward"] == grpo[0]["rollout/reward"], "the same first episodes"
    assert gigpo[0]["actor/grad_norm"] != grpo[0]["actor/grad_norm"]


def test_only_bank_and_extractor_learn_if_the_actor_is_not_trained(tmp_path: Path) -> None:
    """Train, evaluate, resume and export a run whose actor keeps its weights."""
    run = tmp_path / "run"
    sizes = ("tasks.room.eval.online_places=0", "eval.probe_every=0", "extractor.batch=4")
    places = ("tasks.room.stream.places=1", "tasks.room.stream.permanent=1")
    sets = ("actor.train=false", "rollout.max_staleness=0", *sizes, *places)
    steps = trained(run, "complementary", *sets, steps=3)
    assert not any(key.startswith("actor/l") for line in steps for key in line), "no learner"
    assert (
        "total/trained_tokens/actor" not in steps[-1] or not steps[-1]["total/trained_tokens/actor"]
    )
    assert any(line["extractor/updates"] for line in metrics(run, "extractor"))
    assert {path.name for path in (run / "checkpoints" / "3").iterdir()} == {
        "extractor",
        "manifest.json",
    }
    first, last = metrics(run, "eval")
    same = "eval/room/unseen/success/free"
    assert first[same] == last[same], "the same weights in the same episodes"

    assert crl("eval", run).exit_code == 0
    assert crl("eval", run, "--tasks", "room,maze", "--set", "tasks.maze.eval.seen=2",
               "--set", "tasks.maze.eval.unseen=2").exit_code == 0  # fmt: skip
    resumed = crl("resume", run, "--steps", "4")
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert "the actor was not trained" in resumed.stdout
    assert "no sample could be trained on" not in resumed.stdout
    exported = crl("export", run, tmp_path / "actor")
    assert (exported.exit_code, exported.stdout) == (2, "")
    assert exported.stderr.startswith("error: --role = 'actor': ")
    assert exported.stderr.endswith(
        "has no actor, because the run did not train one. Export the extractor.\n"
    )
    changed = crl("resume", run, "--steps", "5", "--set", "actor.train=true")
    assert "actor.train = True: cannot change from False" in changed.stderr
    learned = crl("learn", "--from", run, "--run-dir", tmp_path / "learned", "--steps", "1")
    assert learned.exit_code == 0, "recorded episodes can train the actor"


def test_a_run_that_only_fills_the_bank(tmp_path: Path) -> None:
    """Neither model is trained. Checkpoints have no models, and the run can be continued."""
    run = tmp_path / "run"
    sets = ("tasks.room.eval.online_places=0", "eval.probe_every=0", "extractor.train=false")
    trained(run, "complementary", "actor.train=false", *sets)
    assert [path.name for path in (run / "checkpoints" / "2").iterdir()] == ["manifest.json"]
    resumed = crl("resume", run, "--steps", "3")
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert crl("eval", run).exit_code == 0
    assert crl("export", run, tmp_path / "bank", "--bank").exit_code == 0
    assert "Export the bank with --bank" in crl("export", run, tmp_path / "actor").stderr


def test_experiences_have_the_step_after_which_they_were_written(tmp_path: Path) -> None:
    """The clock is that of a run whose actor learns nothing."""
    sets = ("tasks.room.eval.online_places=0", "eval.probe_every=0", "rollout.max_staleness=0")
    steps = []
    for name, setting in (
        ("kept", "actor.train=false"),
        ("zero", "actor.optimizer.learning_rate=0"),
    ):
        trained(tmp_path / name, "complementary", *sets, setting)
        listed = crl("bank", "ls", tmp_path / name, "--json", "--limit", "0")
        steps.append([entry["step"] for entry in json.loads(listed.stdout)])
    assert steps[0] == steps[1]
    assert set(steps[0]) == {1, 2}


FULL = (
    "actor.profile=full", "extractor.profile=full", "rollout.groups=2", "actor.minibatches=1",
    "actor.max_context_tokens=1024", "extractor.max_context_tokens=1024",
    "extractor.max_response_tokens=24", "extractor.merge_every=0", "extractor.batch=2",
    "tasks.room.max_turns=2", "tasks.room.max_response_tokens=16", "tasks.room.extra_turns=0",
    "tasks.room.stream.places=1", "tasks.room.stream.permanent=1", "retrieval.min_similarity=-1",
    "tasks.room.eval.online_places=0", "tasks.room.eval.probe_places=0",
)  # fmt: skip
"""Settings of language models, for the bundled models, which have not learnt the full rendering."""

LETTERS = f"tasks.room.env={ROOT}/tests/support/letters.py:SPEC"
"""Game in which also these models get rewards."""


@pytest.mark.parametrize(
    "method", ["complementary", "empo2", "gigpo", "grpo", "reflexion", "role_agent"]
)
def test_methods_run_with_the_profile_of_language_models(method: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with_bank = method not in ("gigpo", "grpo")
    sets = [text for text in FULL if with_bank or not text.startswith(("extractor", "retrieval"))]
    steps = trained(run, method, *sets, LETTERS, steps=3)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert not undocumented(run)
    if method == "reflexion":
        assert "actor/updates" not in steps[-1]
        return
    assert 0 < sum(line["rollout/success"] for line in steps) < 3, "the game has a signal"
    updated = [line for line in steps if line["actor/updates"]]
    assert len(updated) == steps[-1]["actor/version"] > 0
    assert all(line["actor/grad_norm"] > 0 for line in updated)


@pytest.mark.parametrize("old", ["with_tips", "without_tips"])
def test_empo2_is_trained_off_policy_with_the_profile_of_language_models(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has memory and is trained off-policy."""
    views: list[tuple[Trajectory, int, str]] = []
    without = Rerenderer.without

    def recorded(self: Rerenderer, trajectory: Trajectory, *args: Any, version: Any) -> Any:
        traces = without(self, trajectory, *args, version=version)
        text = "".join(self.renderer.decode(trace.ids) for trace in traces)
        views.append((trajectory, version, text))
        return traces

    monkeypatch.setattr(Rerenderer, "without", recorded)
    shares = ("empo2.memory_share=1", "empo2.off_policy_share=1", f"empo2.off_policy_old={old}")
    run = tmp_path / "run"
    steps = trained(run, "empo2", *FULL, *shares, LETTERS, steps=3)
    guided = [t for t in read_episodes(run) if t.used]
    assert guided, "tips were shown"
    assert len(views) == len(guided)
    for trajectory, version, text in views:
        assert version == (BEHAVIOUR if old == "with_tips" else STEP_START)
        shown = [s.text for s in trajectory.segments if s.origin == "experience"]
        assert shown
        assert not any(tip in text for tip in shown)
    updates = [line for line in steps if line["step"] > 1 and line["actor/updates"]]
    assert updates, "the actor was trained on stripped episodes"
    for line in updates:
        # One update per step: only the dropped tips can change the log-probs.
        changed = line["actor/approx_kl"] > 1e-6
        assert changed == (old == "with_tips"), line["actor/approx_kl"]


@pytest.mark.parametrize("key", STATE_KEYS)
@pytest.mark.parametrize(
    "task", ["room", "maze", "keyroom", "sokoban", "webshop", "alfworld", "search_qa"]
)
async def test_tips_of_won_episodes_are_found_in_other_episodes_of_the_place(
    task: str, key: str, tmp_path: Path
) -> None:
    """By the thresholds and the embedder that EMPO² has by default."""
    names = {"method": "empo2", "empo2.key": key, "empo2.novelty_coef": 0.0}
    sizes = {"rollout.groups": 4, "rollout.group_size": 4, "run.steps": 1}
    config = load([task], options=names | sizes)
    await asyncio.to_thread(play_episodes, config, tmp_path / "run", scripted=True)
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in read_episodes(tmp_path / "run"):
        groups.setdefault(trajectory.address.group, []).append(trajectory)
    state, embedder = STATE_KEYS[key], HashEmbedder()
    found: list[bool] = []
    for group in groups.values():
        for won in (t for t in group if t.success):
            tip = await embedder.embed([state.of_last_action(won.segments)])
            for other in (t for t in group if t is not won):
                searches = [
                    state.text(other.segments[:i])
                    for i, segment in enumerate(other.segments)
                    if segment.origin == "policy"
                ]
                cosines = await embedder.embed(searches) @ tip[0]
                found.append(bool(cosines.max() >= config.retrieval.min_similarity))
    assert sum(found) > len(found) / 2 > 0, f"{sum(found)} of {len(found)}"


REFLEXION = ("reflexion.writer=extractor", "tasks.room.eval.online_places=1")


def attempts(run: Path) -> dict[int, list[Trajectory]]:
    """Return the recorded attempts of each group, in order."""
    groups: dict[int, list[Trajectory]] = {}
    for episode in read_episodes(run):
        groups.setdefault(episode.group, []).append(episode)
    return groups


def test_attempts_are_guided_by_the_reflections_on_earlier_ones(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = trained(run, "reflexion", *REFLEXION, "reflexion.memory=2")
    assert trained(tmp_path / "again", "reflexion", *REFLEXION, "reflexion.memory=2") == steps
    groups = attempts(run)
    assert len(groups) == 8
    entries = json.loads(crl("bank", "ls", run, "--json", "--limit", "0", "--status", "all").stdout)
    written = {entry["uid"]: entry["text"] for entry in entries}
    followed = 0
    for members in groups.values():
        assert [m.address.member for m in members] == list(range(len(members)))
        assert not any(m.success for m in members[:-1]), "no attempt after a success"
        assert members[-1].success or len(members) == 4
        reflections: list[str] = []
        for member in members:
            assert [use.uid for use in member.used] == reflections[-2:]
            assert list(member.guidance.shown) == [written[use.uid] for use in member.used]
            followed += bool(member.used)
            step, group, number = member.address.step, member.group, member.address.member
            source = f"run/{step}/{group}/{number}#"
            reflections += sorted(uid for uid in written if uid.startswith(source))
    assert followed
    uses = Counter(use.uid for members in groups.values() for m in members for use in m.used)
    assert {e["uid"]: e["retrieved"] for e in entries if e["retrieved"]} == uses
    for number, line in enumerate(steps):
        of_step = [m for m in groups.values() if m[0].address.step == number]
        for n in range(1, 5):
            solved = sum(any(attempt.success for attempt in m[:n]) for m in of_step)
            assert line[f"rollout/success/attempt/{n}"] == solved / 4
    within = [
        sum(any(attempt.success for attempt in m[:n]) for m in groups.values()) / 8
        for n in range(1, 5)
    ]
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["attempts"] == {"tasks": 8, "success_within": pytest.approx(within)}
    ends = f"success within 1 attempt {within[0]:.3f} [", f", 4 attempts {within[3]:.3f} ["
    assert all(end in (run / "log.txt").read_text("utf-8") for end in ends)
    assert crl("report", run).exit_code == 0
    shares = ", ".join(f"{share:.3f}" for share in within)
    assert f"<dd>{shares} (8 tasks)</dd>" in (run / "report.html").read_text("utf-8")
    assert not any(key.startswith("actor/l") for line in steps for key in line), "no learner"
    assert not undocumented(run)
    last = metrics(run, "eval")[-1]
    assert "eval/room/unseen/success/online/visit5" in last, "memory of unseen places"


def test_reflexion_continues_and_is_evaluated(tmp_path: Path) -> None:
    """The actor reflects. The bundled one writes nothing usable, and the run says so."""
    run = tmp_path / "run"
    trained(run, "reflexion", "tasks.room.eval.online_places=1")
    resumed = crl("resume", run, "--steps", "3")
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert "all answers about episodes were dropped" in resumed.stdout
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["experience"]["writer"] == "actor"
    assert crl("eval", run).exit_code == 0
    assert crl("eval", run, "--experience", "online").exit_code == 0
    refused = crl(*arguments(tmp_path / "no", "room", ("bank.frozen=true",), 1, 0, "reflexion"))
    assert "reflexion trains no model" in refused.stderr


def test_reflexion_resumes_beside_attempts_of_the_next_step(tmp_path: Path) -> None:
    """Attempts of the next step are reflected on while a step is completed.

    The checkpoint's bank has their reflections. After a resumption they are played again.
    """
    run = tmp_path / "run"
    sizes = tuple(text for text in SETS if text not in DETERMINISTIC)
    sets = (
        *sizes, "reflexion.writer=extractor", "tasks.room.eval.online_places=0",
        "run.checkpoint_every=1", "run.keep_every=1",
    )  # fmt: skip
    result = crl(*arguments(run, "room", sets, 4, 0, "reflexion"))
    assert (result.exit_code, result.stderr) == (0, "")
    renamed = 0
    for step in (1, 2, 3):
        fork = tmp_path / f"fork{step}"
        assert crl("fork", run, fork, "--from", str(step)).exit_code == 0
        resumed = crl("resume", fork, "--steps", str(step + 2))
        assert (resumed.exit_code, resumed.stderr) == (0, "")
        assert len(metrics(fork, "train")) == step + 2
        renamed += sum(entry["uid"].startswith("run.1/") for entry in tips(fork))
    assert renamed, "no attempt was played again"


EMPO2 = (
    "empo2.writer=extractor", "empo2.memory_share=0.5", "empo2.off_policy_share=0.5",
    "tasks.room.eval.online_places=1", "tasks.room.stream.places=2",
    "tasks.room.stream.permanent=2", "eval.probe_every=0",
)  # fmt: skip


def test_empo2_resumes_to_the_same_result(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = trained(run, "empo2", *EMPO2, steps=6)
    assert not undocumented(run)
    by_step: dict[int, list[Trajectory]] = {}
    for episode in read_episodes(run):
        by_step.setdefault(episode.address.step, []).append(episode)
    modes = [{t.condition for t in members} for members in by_step.values()]
    assert all(len(mode) == 1 for mode in modes)
    assert {mode for one in modes for mode in one} == {"guided", "free"}
    used = [use for members in by_step.values() for t in members for use in t.used]
    assert used, "tips were shown"
    off_policy = MemorySteps(0.5, 0, "update mode")
    stripped = {s for s, members in by_step.items() if any(t.used for t in members)}
    assert any(step in off_policy for step in stripped), "an off-policy step"
    assert any(step not in off_policy for step in stripped), "an on-policy step with tips"
    goals = {entry["uid"]: entry["goal"] for entry in tips(run)}
    pairs = [
        (t.task.goal, goals[uid])
        for members in by_step.values()
        for t in members
        for uid in shown(t)
        if uid in goals
    ]
    assert pairs, "a shown tip is still in the memory"
    assert all(of_episode == of_tip for of_episode, of_tip in pairs)
    assert all("novelty" in t.rewards for members in by_step.values() for t in members)
    half = tmp_path / "half"
    trained(half, "empo2", *EMPO2, steps=3)
    assert crl("resume", half, "--steps", "6").exit_code == 0
    resumed = [
        {key: value for key, value in line.items() if not key.startswith(("time", "perf/"))}
        for line in metrics(half, "train")
    ]
    assert resumed == whole
    for mode in ("none", "bank", "online"):
        assert crl("eval", run, "--experience", mode).exit_code == 0


VARIATIONS = '''
"""Rooms with one goal, whose tasks name the place as their variation."""

from dataclasses import replace

from crl.envs.base import EnvTasks
from crl.envs.room import SPEC as ROOM


def anonymous(task):
    return replace(
        task, name="rooms", goal="Room: the old hall. Reach the stairs down (>).",
        params={**task.params, "variation": task.params["place"]},
    )


class Stream:
    def __init__(self, seed, settings):
        self._stream = ROOM.tasks.train_stream(seed, settings)
        self.observe, self.state = self._stream.observe, self._stream.state
        self.load_state = self._stream.load_state

    def draw(self, n):
        return list(map(anonymous, self._stream.draw(n)))


def eval_tasks(split, n, seed, settings):
    return tuple(map(anonymous, ROOM.tasks.eval_tasks(split, n, seed, settings)))


SPEC = replace(ROOM, name="rooms", tasks=EnvTasks(Stream, eval_tasks))
'''


def test_tips_guide_only_episodes_of_their_own_variation(tmp_path: Path) -> None:
    """In ScienceWorld, for example, the variations of a task share one goal."""
    (tmp_path / "rooms.py").write_text(VARIATIONS, "utf-8")
    file = tmp_path / "rooms.toml"
    shipped = (ROOT / "tasks" / "room.toml").read_text("utf-8")
    file.write_text(shipped.replace('env = "room"', 'env = "rooms.py:SPEC"'), "utf-8")
    sets = (
        "empo2.writer=extractor", "empo2.memory_share=1", "tasks.rooms.stream.places=2",
        "tasks.rooms.stream.permanent=2", "eval.probe_every=0", "rollout.groups=4",
        "rollout.group_size=4", "retrieval.min_similarity=-1", "tasks.rooms.eval.seen=2",
        "tasks.rooms.eval.unseen=2", "tasks.rooms.eval.online_places=0",
        "tasks.rooms.eval.probe_places=0", *DETERMINISTIC,
    )  # fmt: skip
    variations: dict[str, set[str]] = {}
    for scope in ("variation", "goal"):
        run = tmp_path / scope
        result = crl(*arguments(run, str(file), (*sets, f"bank.scope={scope}"), 3, 0, "empo2"))
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        written = {entry["uid"]: entry["variation"] for entry in tips(run)}
        assert len(set(written.values())) == 2
        episodes = list(read_episodes(run))
        assert {t.task.goal for t in episodes} == {"Room: the old hall. Reach the stairs down (>)."}
        assert any(t.used for t in episodes)
        variations[scope] = {
            "own" if written[uid] == t.task.place.variation else "other"
            for t in episodes
            for uid in shown(t)
        }
    assert variations == {"variation": {"own"}, "goal": {"own", "other"}}


def test_the_actor_writes_in_an_online_evaluation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No extractor is opened for a method whose actor writes the bank."""
    run = tmp_path / "run"
    trained(run, "empo2", "tasks.room.eval.online_places=1", "eval.probe_every=0")
    opened: list[str] = []
    open_engine = models.open_engine

    async def recorded(section: Any, model: Any, *rest: Any, **options: Any) -> Any:
        opened.append(model.role)
        return await open_engine(section, model, *rest, **options)

    monkeypatch.setattr(models, "open_engine", recorded)
    assert crl("eval", run, "--experience", "online").exit_code == 0
    assert opened == ["actor"]


def tips(run: Path) -> list[dict[str, Any]]:
    return json.loads(crl("bank", "ls", run, "--json", "--limit", "0", "--status", "all").stdout)


def shown(trajectory: Trajectory) -> set[str]:
    return {use.uid for use in trajectory.used}
