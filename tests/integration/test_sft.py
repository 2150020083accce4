"""Supervised fine-tuning: `crl sft`, and demonstrations by `crl rollout --scripted`."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crl.config.load import load_saved
from crl.config.models import model_profile, resolve_model
from crl.modeling.loading import load_model, load_tokenizer
from crl.records.reader import episode_shards
from crl.records.shards import read_shard, write_shard
from crl.run.halves import sft
from crl.run.halves.sft import minibatch, recorded_demonstrations
from crl.run.models import actor_model
from crl.types import TokenTrace, TrainSample
from support.documented_metrics import undocumented
from support.whole_runs import crl, episodes, lines, metrics, one_line

TASK = ("--tasks", "room", "--set", "rollout.groups=8", "--set", "rollout.group_size=4")
FAST = ("--learning-rate", "1e-3")
TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
INVALID_LINES = {
    "no JSON": "is not JSON (Expecting value: line 1 column 1 (char 0))",
    '{"prompt": "a", "completion": "b"}': "has no list of messages",
    '{"messages": []}': "has no message of the assistant",
    '{"messages": [{"role": "user", "content": "a"}]}': "has no message of the assistant",
    '{"messages": [{"role": "tool", "content": "a"}]}': "message 1 has the role 'tool'",
    '{"messages": [{"role": 1}]}': "message 1 has no role or no content",
    '{"messages": [{"role": "user", "content": [1]}]}': "the content of message 1 is not a text",
    '{"messages": [{"role": "assistant", "content": "a"}]}': "begins with the assistant",
}
"""Invalid lines of a file of conversations, and the reasons that an error gives."""


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of two steps of demonstrations."""
    run = tmp_path_factory.mktemp("demonstrated") / "run"
    result = crl("rollout", "--scripted", *TASK, "--steps", 2, "--run-dir", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"train on them: crl sft --from {run}" in result.stdout
    return run


def losses(output: str) -> tuple[float, float]:
    found = re.search(r"held-out loss: +([\d.]+) → ([\d.]+) nats per token", output)
    assert found
    return float(found[1]), float(found[2])


def test_scripted_players_play_the_episodes_of_a_run(demonstrated: Path, tmp_path: Path) -> None:
    played = episodes(demonstrated)
    assert len(played) == 2 * 8 * 4
    assert {t["condition"] for t in played} == {"free"}
    assert 0.3 < sum(t["success"] for t in played) / len(played) <= 1
    tokenizer = load_tokenizer(resolve_model("tiny-actor"))
    for t in played[:8]:
        actions = [s["text"] for s in t["segments"] if s["origin"] == "policy"]
        assert tokenizer.encode(actions[0], add_special_tokens=False)
        assert len(actions) == len(t["turn_rewards"])
    again = tmp_path / "again"
    assert crl("rollout", "--scripted", *TASK, "--steps", 1, "--run-dir", again).exit_code == 0
    texts = [[s["text"] for s in t["segments"]] for t in played[:32]]
    assert [[s["text"] for s in t["segments"]] for t in episodes(again)] == texts


def test_a_model_learns_from_recorded_demonstrations(demonstrated: Path, tmp_path: Path) -> None:
    run = tmp_path / "sft"
    result = crl("sft", "--from", demonstrated, *FAST, "--epochs", 1, "--run-dir", run)
    assert (result.exit_code, result.stderr) == (0, "")
    start, best = losses(result.stdout)
    assert best < start
    assert {line["kind"] for line in lines(run / "metrics.jsonl")} == {"sft"}
    assert undocumented(run) == set()
    held_out = [m for m in metrics(run, "sft") if "sft/held_out_nll" in m]
    assert [round(m["sft/held_out_nll"], 3) for m in held_out] == [best]
    assert sorted(path.name for path in (run / "actor").glob("*.safetensors")) == [
        "model.safetensors"
    ]
    later = ("train", *TASK, "--set", f"actor.model={run}/actor", "--dry-run")
    assert crl(*later).exit_code == 0
    again = tmp_path / "again"
    result = crl(
        "sft", "--from", demonstrated, *FAST, "--epochs", 1, "--run-dir", again,
        "--set", "actor.lora.rank=8",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert (again / "actor" / "adapter_config.json").exists()
    assert losses(result.stdout)[0] == start


@pytest.mark.parametrize(("sets", "warmup"), [((), 3), (("actor.optimizer.warmup_steps=1",), 1)])
def test_a_tenth_of_the_updates_is_the_warm_up(
    sets: tuple[str, ...], warmup: int, tmp_path: Path
) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 15, "utf-8")
    result = crl(
        "sft", "--from", file, "--tasks", "room", "--held-out", 0, "--epochs", 2,
        "--batch-tokens", 1, "--learning-rate", 1e-3, "--run-dir", run,
        *(part for text in sets for part in ("--set", text)),
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert f"at most 30 updates; warm-up of {warmup}" in result.stdout
    rates = [line["sft/learning_rate"] for line in metrics(run, "sft")]
    first = [min(1.0, (update + 1) / warmup) * 1e-3 for update in range(10)]
    assert rates[0] == pytest.approx(sum(first) / 10)
    assert rates[1:] == pytest.approx([1e-3] * 3)


def test_a_long_training_has_fewer_lines_per_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "MAX_LINES", 2)
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 30, "utf-8")
    result = crl(
        "sft", "--from", file, "--tasks", "room", "--held-out", 0, "--epochs", 1,
        "--batch-tokens", 1, "--run-dir", run,
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert [line["step"] for line in metrics(run, "sft")] == [15, 30]


@pytest.mark.parametrize(
    ("patience", "best", "last"), [(1, 1, 2), (2, 3, 5)], ids=["patience 1", "patience 2"]
)
def test_the_best_epoch_is_written_and_training_ends_without_a_better_one(
    patience: int, best: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([4.0, 3.0, 3.5, 2.0, 2.5, 2.4, 1.0])  # before the training and after each epoch
    written: list[bytes] = []
    write = sft._write

    async def held_out_loss(*_: object) -> float:
        return next(losses)

    async def recorded(learner: Any, role: Any, target: Path) -> None:
        await write(learner, role, target)
        written.append((target / "model.safetensors").read_bytes())

    monkeypatch.setattr(sft, "_held_out_loss", held_out_loss)
    monkeypatch.setattr(sft, "_write", recorded)
    run = tmp_path / "run"
    result = crl(
        "sft", "--from", "drills", "--tasks", "room", *FAST, "--demonstrations", 12,
        "--held-out", 0.5, "--epochs", 6, "--patience", patience, "--run-dir", run,
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    epochs = [line["sft/epoch"] for line in metrics(run, "sft") if "sft/epoch" in line]
    assert epochs == [*range(1, last + 1)]
    assert f"the actor after epoch {best}, in" in result.stdout
    assert (run / "actor" / "model.safetensors").read_bytes() == written[-1]
    assert len(written) == len({*written}) == (1 if patience == 1 else 2)


def test_importance_weights_of_a_run_do_not_apply(tmp_path: Path) -> None:
    """Demonstrations have no log-probs of an engine, with which a weight would be computed."""
    weights = ("--set", "actor.old_logp=recompute", "--set", "actor.importance_cap=2")
    run = tmp_path / "run"
    played = crl("rollout", "--scripted", *TASK, *weights, "--steps", 1, "--run-dir", run)
    assert (played.exit_code, played.stderr) == (0, "")
    result = crl("sft", "--from", run, *FAST, "--epochs", 1, "--run-dir", tmp_path / "sft")
    assert (result.exit_code, result.stderr) == (0, "")
    actor = load_saved(tmp_path / "sft").config.actor
    assert (actor.old_logp, actor.importance_cap) == ("behaviour", None)
    refused = crl("sft", "--from", run, *weights, "--run-dir", tmp_path / "none")
    message = "actor.old_logp = 'recompute': does not apply: supervised fine-tuning always uses"
    assert message in one_line(refused)


def test_switches_of_a_run_that_need_other_models_do_not_apply(tmp_path: Path) -> None:
    switches = ("ask.enabled=true", "critic.enabled=true", "extractor.perplexity.weight=0.5",
                "actor.top_k=5")  # fmt: skip
    sets = [word for switch in switches for word in ("--set", switch)]
    run = tmp_path / "run"
    played = crl("rollout", "--scripted", *TASK, *sets, "--steps", 1, "--run-dir", run)
    assert (played.exit_code, played.stderr) == (0, "")
    result = crl("sft", "--from", run, *FAST, "--epochs", 1, "--run-dir", tmp_path / "sft")
    assert (result.exit_code, result.stderr) == (0, "")
    for role, setting in (("actor", "top_k=5"), ("extractor", "top_p=0.5")):
        given = ("--set", f"{role}.{setting}", "--role", role, "--run-dir", tmp_path / "none")
        error = one_line(crl("sft", "--from", "drills", *TASK, *given))
        assert f"{role}.{setting.replace('=', ' = ')}: does not apply" in error


def test_the_command_and_the_schedule_are_saved(tmp_path: Path) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 20, "utf-8")
    options = (
        "--from", file, "--tasks", "room", "--epochs", 1, "--batch-tokens", 1, "--held-out", 0.0,
        "--decay", "--set", "actor.optimizer.beta2=0.99",
    )  # fmt: skip
    assert crl("sft", *options, "--seed", 3, "--run-dir", run).exit_code == 0
    saved = load_saved(run)
    assert shlex.split(saved.command) == ["crl", "sft", *map(str, options)]
    optimizer = saved.config.actor.optimizer
    assert (optimizer.warmup_steps, optimizer.decay_steps) == (2, 20)


def test_the_learning_rate_may_decay(tmp_path: Path) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 20, "utf-8")
    options = (
        "sft", "--from", file, "--tasks", "room", "--held-out", 0, "--epochs", 1,
        "--batch-tokens", 1, "--learning-rate", 1e-3, "--decay", "--run-dir", run,
    )  # fmt: skip
    result = crl(*options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "at most 20 updates; warm-up of 2; learning rate 0.001, falling to 0" in result.stdout
    rates = [line["sft/learning_rate"] for line in metrics(run, "sft")]
    each = [5e-4, 1e-3, *(1e-3 * (20 - update) / 19 for update in range(2, 20))]
    assert rates == pytest.approx([sum(each[:10]) / 10, sum(each[10:]) / 10])
    shutil.rmtree(run)
    error = one_line(crl(*options, "--set", "actor.optimizer.warmup_steps=20"))
    assert "actor.optimizer.warmup_steps = 20: leaves no update for --decay" in error


def test_the_decay_of_a_preset_file_does_not_apply(tmp_path: Path) -> None:
    file, run, preset = (tmp_path / name for name in ("talks.jsonl", "run", "mine.toml"))
    file.write_text(f"{TALK}\n" * 10, "utf-8")
    preset.write_text('base = "cpu"\n[actor.optimizer]\ndecay_steps = 3\n', "utf-8")
    result = crl(
        "sft", "--from", file, "--tasks", "room", "--preset", preset, "--held-out", 0,
        "--epochs", 1, "--batch-tokens", 1, "--learning-rate", 1e-3, "--run-dir", run,
        "--set", "actor.optimizer.warmup_steps=4",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    (line,) = metrics(run, "sft")
    assert line["sft/learning_rate"] == pytest.approx(1e-3 * (0.25 + 0.5 + 0.75 + 7) / 10)
    assert load_saved(run).config.actor.optimizer.decay_steps == 0


def test_the_other_tokens_may_have_a_weight() -> None:
    """Check that the losses of both kinds of tokens are means, and the first token has none."""
    traces = [
        TokenTrace(ids=(5,) * len(mask), mask=mask, logprobs=(0.0,) * len(mask),
                   versions=(-1,) * len(mask))
        for mask in ((0, 0, 1, 1), (0, 1))
    ]  # fmt: skip
    batch = minibatch(traces, 0.5)
    assert batch.total_tokens == 3, "the demonstrator's tokens"
    assert [sample.trace.mask for sample in batch.samples] == [(0, 1, 1, 1), (0, 1)]
    # One other token is predicted. Its weight is 0.5 · 3 / 1.
    assert batch.samples[0].advantage == (1.5, 1.5, 1.0, 1.0)
    assert minibatch(traces, 0.0).samples[0] == TrainSample(traces[0], 1.0, 1.0)


def test_a_model_learns_the_other_tokens_too(tmp_path: Path) -> None:
    """Check that the loss on a prompt falls only if it has a weight."""
    file = tmp_path / "talks.jsonl"
    file.write_text(f"{TALK}\n" * 40, "utf-8")
    falls = []
    for weight in (0, 1):
        run = tmp_path / str(weight)
        result = crl(
            "sft", "--from", file, "--tasks", "room", "--held-out", 0, "--epochs", 2,
            "--learning-rate", 1e-3, "--batch-tokens", 50, "--context-weight", weight,
            "--run-dir", run,
        )  # fmt: skip
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        first, *_, last = (
            prompt_loss(path) for path in (resolve_model("tiny-actor"), run / "actor")
        )
        falls.append(first - last)
    assert falls[1] > falls[0] + 0.5


def prompt_loss(model: Path) -> float:
    """Return the mean loss of a model on the prompt of `TALK`, in nats per token."""
    loaded, tokenizer = load_model(model, torch.device("cpu")), load_tokenizer(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    ids = torch.tensor([tokenizer.encode(str(text))])
    with torch.no_grad():
        return float(loaded(ids, labels=ids).loss)


def test_the_optimizer_of_a_preset_file_is_used(tmp_path: Path) -> None:
    """Bundled presets have the optimizers of reinforcement learning: their rates do not count."""
    file = tmp_path / "talks.jsonl"
    file.write_text(f"{TALK}\n" * 4, "utf-8")
    own, compact = tmp_path / "own.toml", tmp_path / "compact.toml"
    own.write_text('base = "cpu"\n[actor.optimizer]\nlearning_rate = 3e-4\nwarmup_steps = 2\n')
    compact.write_text('base = "cpu"\n[compact.actor.optimizer]\nlearning_rate = 5e-4\n')
    for n, (options, rate, warmup) in enumerate(
        (
            ((), 1e-4, 0),
            (("--preset", own), 3e-4, 2),
            (("--preset", compact), 5e-4, 0),
            (("--preset", own, "--learning-rate", 1e-3), 1e-3, 2),
            (("--preset", own, "--set", "actor.optimizer.learning_rate=2e-3"), 2e-3, 2),
            (("--set", "actor.optimizer.learning_rate=2e-3"), 2e-3, 0),
        )
    ):
        run = tmp_path / str(n)
        result = crl(
            "sft", "--from", file, "--tasks", "room", "--held-out", 0, "--epochs", 1,
            "--batch-tokens", 1, "--run-dir", run, *options,
        )  # fmt: skip
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        assert f"4 updates; warm-up of {warmup}; learning rate {rate:g}\n" in result.stdout
        (line,) = metrics(run, "sft")
        steps = [min(1.0, (update + 1) / warmup) if warmup else 1.0 for update in range(4)]
        assert line["sft/learning_rate"] == pytest.approx(rate * sum(steps) / 4)


def test_scripted_demonstrations_are_played_first(tmp_path: Path) -> None:
    run, preset = tmp_path / "run", tmp_path / "mine.toml"
    preset.write_text('[actor]\nmodel = "tiny-actor"\nmax_context_tokens = 1024\n')
    result = crl("sft", "--from", "scripted", *TASK, "--steps", 1, *FAST, "--epochs", 1,
                 "--held-out", 0, "--run-dir", run, "--preset", preset,
                 "--set", "actor.profile=full", "--set", "tasks.room.rendering=compact",
                 "--set", "tasks.room.max_turns=4", "--set", "tasks.room.max_response_tokens=4",
                 )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"crl train --tasks room --preset {preset} --set actor.model={run}/actor" in (
        result.stdout
    )
    assert model_profile(run / "actor") == "full", "as set, not as the model declares"
    assert len(episodes(run)) == 32
    assert "held-out loss" not in result.stdout
    won = sum(t["success"] for t in episodes(run))
    assert f"{won} demonstrations with" in result.stdout
    everything = crl("sft", "--from", run, *FAST, "--epochs", 1, "--held-out", 0, "--lost",
                     "--run-dir", tmp_path / "lost")  # fmt: skip
    assert f"{len(episodes(run))} demonstrations with" in everything.stdout


def test_conversations(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    talks = [
        [
            {"role": "user", "content": f"Room: the tall barn {number}."},
            {"role": "assistant", "content": "north"},
            {"role": "user", "content": "at 1 1"},
            {"role": "assistant", "content": "north"},
        ]
        for number in range(20)
    ]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), "utf-8")
    run = tmp_path / "run"
    result = crl("sft", "--from", file, "--tasks", "room", "--learning-rate", 3e-3,
                 "--batch-tokens", 200, "--epochs", 2, "--run-dir", run)  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert "18 demonstrations with" in result.stdout
    start, best = losses(result.stdout)
    assert best < start - 0.3
    for line, reason in INVALID_LINES.items():
        file.write_text(json.dumps({"messages": talks[0]}) + "\n\n" + line + "\n", "utf-8")
        error = one_line(
            crl("sft", "--from", file, "--tasks", "room", "--run-dir", tmp_path / "none")
        )
        assert f"{file}, line 3': {reason}" in error
        assert not (tmp_path / "none" / "config.json").exists()


def test_recordings_outside_of_a_run_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "0.jsonl.gz"
    file.write_bytes(b"")
    for source in (tmp_path, file):
        error = one_line(crl("sft", "--from", source, "--run-dir", tmp_path / "none"))
        assert f"--from = '{source}': is not a recording: {tmp_path} is not a run" in error


def test_answers_of_a_file_have_no_control_tokens(tmp_path: Path) -> None:
    """The model would learn to continue after the end of its turn."""
    file = tmp_path / "talks.jsonl"
    talk = json.loads(TALK)
    talk["messages"][0]["content"] = "The end of a turn is <|im_end|>."  # is escaped
    file.write_text(f"{json.dumps(talk)}\n" * 20, "utf-8")
    options = ("--tasks", "room", "--epochs", 1, "--held-out", 0, "--run-dir")
    assert crl("sft", "--from", file, *options, tmp_path / "run").exit_code == 0
    talk["messages"][1]["content"] = "go<|im_end|>stop"
    with file.open("a", encoding="utf-8") as lines_:
        lines_.write(json.dumps(talk) + "\n")
    error = one_line(crl("sft", "--from", file, *options, tmp_path / "none"))
    assert f"{file}, line 21': an answer contains the control token '<|im_end|>' of the" in error


def test_recorded_replies_with_control_tokens_are_left_out(
    demonstrated: Path, tmp_path: Path
) -> None:
    """Their texts may come from a model of another family, in which they are no control tokens."""
    run = tmp_path / "run"
    shutil.copytree(demonstrated, run)
    step, shard = next(iter(episode_shards(run).items()))
    first, *others = read_shard(shard)
    reply = next(i for i, s in enumerate(first.segments) if s.origin == "policy")
    segments = list(first.segments)
    segments[reply] = replace(segments[reply], text="north<|im_end|>")
    write_shard(shard.parent, step, [replace(first, segments=tuple(segments)), *others])
    result = crl("sft", "--from", run, "--epochs", 1, "--run-dir", tmp_path / "sft")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 episode left out: a reply contains a control token of the model" in result.stdout


def test_a_training_without_finite_updates_is_an_error(tmp_path: Path) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 20, "utf-8")
    options = ("--from", file, "--tasks", "room", "--held-out", 0, "--batch-tokens", 64)
    error = one_line(crl("sft", *options, "--learning-rate", 1e30, "--run-dir", run))
    assert "of epoch 1 were skipped, because the loss or the gradient was not finite" in error
    assert not (run / "actor").exists()
    error = one_line(crl("sft", *options, "--context-weight", "inf", "--run-dir", tmp_path / "n"))
    assert "--context-weight = inf: is not a finite number" in error


def test_turns_in_overtime_are_not_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert crl("rollout", *TASK, "--steps", 1, "--run-dir", run).exit_code == 0
    saved, renderer = load_saved(run).config, actor_model(load_saved(run).config, print).renderer
    shards = episode_shards(run)
    found = recorded_demonstrations(saved, renderer, shards, lost=True, note=print)
    played = [t for path in shards.values() for t in read_shard(path)]
    assert any(sum(s.origin == "policy" for s in t.segments) > t.turns for t in played)
    for demonstration, t in zip(found, played, strict=True):
        (trace,) = demonstration.traces
        (end,) = renderer.stop_ids[:1]
        trained = [i for i, mask in zip(trace.ids, trace.mask, strict=True) if mask]
        assert trained.count(end) == t.turns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "scripted"], "--tasks = None: is required for scripted"),
        (["--from", "drills"], "--tasks = None: is required for drills"),
        (["--from", "scripted", "--demonstrations", 9], "does not apply to scripted players"),
        (["--from", "no/such"], "is neither scripted, nor drills, nor a run, nor a file"),
        (["--from", "no/such", "--steps", 2], "is neither scripted, nor drills, nor a run"),
        (["--from", "scripted", "--tasks", "river,river"], "river"),
    ],
)
def test_requests_that_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in one_line(crl("sft", *options, "--run-dir", tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 2], "--steps = 2: does not apply to recorded episodes"),
        (["--preset", "gpu1"], "--preset = 'gpu1': does not apply to recorded episodes"),
        (["--preset", "cpu"], "--preset = 'cpu': does not apply to recorded episodes"),
        (["--tasks", "room"], "--tasks = 'room': does not apply to recorded episodes"),
        (["--tasks", "room", "--steps", 4], "--steps = 4: does not apply to conversations"),
        (["--tasks", "room", "--lost"], "--lost = True: does not apply to conversations"),
    ],
)
def test_options_of_other_sources_are_refused(
    options: list[object], message: str, demonstrated: Path, tmp_path: Path
) -> None:
    """The default of an option is refused too, if it was given."""
    source = demonstrated
    if "conversations" in message:
        source = tmp_path / "talks.jsonl"
        source.write_text(TALK + "\n", "utf-8")
    error = one_line(crl("sft", "--from", source, *options, "--run-dir", tmp_path / "run"))
    assert message in error
    assert not (tmp_path / "run").exists()


def test_demonstrations_that_cannot_be_used(demonstrated: Path, tmp_path: Path) -> None:
    def error(*options: object) -> str:
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return one_line(crl("sft", "--from", demonstrated, *options, "--run-dir", run))

    none = error("--set", "actor.max_context_tokens=26")
    assert f"--from = '{demonstrated}': has no demonstration to train on: all " in none
    assert "have more than 26 tokens" in none
    assert "raise actor.max_context_tokens" in none
    assert "--held-out = 1.5: leaves nothing to train on" in error("--held-out", 1.5)
    assert "actor.kl_coef = 0.05: does not apply" in error("--set", "actor.kl_coef=0.05")
    assert "actor.temperature = 2.0: does not apply" in error("--set", "actor.temperature=2.0")
    decay = error("--set", "actor.optimizer.decay_steps=80")
    assert "actor.optimizer.decay_steps = 80: does not apply" in decay
    assert "use --decay" in decay
    other = error("--set", "extractor.lora.rank=4")
    assert "extractor.lora.rank = 4: has no effect: --role actor trains the actor alone" in other
    assert "no epoch has a lower held-out loss" in error("--learning-rate", 0)
    assert not list(tmp_path.glob("run*/actor")), "no empty directory of a model"


def test_sources_without_a_demonstration_are_named(demonstrated: Path, tmp_path: Path) -> None:
    shutil.copytree(demonstrated, lost := tmp_path / "lost")
    for file in (lost / "episodes").glob("*.jsonl.gz"):
        records = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        for record in records:
            record["success"] = False
        text = "".join(json.dumps(record) + "\n" for record in records)
        file.write_bytes(gzip.compress(text.encode()))
    error = one_line(crl("sft", "--from", lost, "--run-dir", tmp_path / "a"))
    assert f"--from = '{lost}': has no demonstration to train on: no episode was won" in error
    assert "or --lost to train on lost episodes too" in error
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", "utf-8")
    error = one_line(crl("sft", "--from", empty, "--tasks", "room", "--run-dir", tmp_path / "b"))
    assert f"--from = '{empty}': has no demonstration to train on: the file is empty" in error


@pytest.mark.parametrize(
    ("role", "model"), [("actor", "tiny-extractor"), ("extractor", "tiny-actor")]
)
def test_a_model_learns_the_drills_of_the_other_role(role: str, model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = crl(
        "sft", "--from", "drills", "--role", role, "--model", model, *TASK, *FAST,
        "--demonstrations", 30, "--epochs", 1, "--run-dir", run,
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert "27 demonstrations with" in result.stdout
    start, best = losses(result.stdout)
    assert best < start - 0.2
    assert f"--set {role}.model={run}/{role}" in result.stdout
    assert model_profile(run / role) == "compact"
    assert [path.name for path in run.iterdir() if path.is_dir()] == [role]
    later = ("train", *TASK, "--set", f"{role}.model={run}/{role}", "--dry-run")
    assert crl(*later).exit_code == 0


def test_the_extractor_learns_from_conversations(tmp_path: Path) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 5, "utf-8")
    options = ("--tasks", "room", "--held-out", 0, "--epochs", 1, "--run-dir", run)
    result = crl("sft", "--from", file, "--role", "extractor", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"the extractor after epoch 1, in Hugging Face format: {run}/extractor" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 2], "--steps = 2: does not apply to drills"),
        (["--lost"], "--lost = True: does not apply to drills"),
        (
            ["--set", "tasks.room.rendering=full"],
            "tasks.room.rendering = 'full': is not the rendering of the drills",
        ),
        (
            [
                "--role",
                "extractor",
                "--set",
                "extractor.profile=full",
                "--set",
                "extractor.max_context_tokens=1024",
                "--set",
                "extractor.max_response_tokens=40",
                "--set",
                "extractor.merge_every=0",
            ],
            "extractor.profile = 'full': is not the profile of the drills",
        ),
        (
            ["--role", "extractor", "--set", "extractor.kl_coef=0.1"],
            "extractor.kl_coef = 0.1: does not apply",
        ),
        (
            ["--role", "extractor", "--set", "extractor.train=false"],
            "extractor.train = False: leaves the extractor untrained",
        ),
        (
            ["--role", "extractor", "--set", "bank.frozen=true", "--set", "bank.init=old.sqlite"],
            "bank.frozen = True: leaves the extractor untrained",
        ),
        (
            ["--role", "extractor", "--set", "method=grpo"],
            "method = 'grpo': leaves the extractor untrained",
        ),
    ],
)
def test_requests_for_drills_that_are_refused(
    options: list[object], message: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    error = one_line(crl("sft", "--from", "drills", "--tasks", "room", *options, "--run-dir", run))
    assert message in error
    assert not (run / "config.json").exists()


def test_the_files_of_the_other_models_are_not_used(tmp_path: Path) -> None:
    """Of the actor, only the profile counts, which the settings of the tasks depend on."""
    file, actor, run = tmp_path / "talks.jsonl", tmp_path / "actor", tmp_path / "run"
    file.write_text(f"{TALK}\n" * 4, "utf-8")
    actor.mkdir()
    (actor / "crl.json").write_text('{"profile": "compact"}', "utf-8")
    (actor / "config.json").write_text('{"max_position_embeddings": 8}', "utf-8")
    others = (f"actor.model={actor}", f"embedder.model={actor}", f"bank.init={tmp_path / 'none'}")
    options = [part for text in others for part in ("--set", text)]
    result = crl(
        "sft", "--from", file, "--role", "extractor", "--tasks", "room", "--epochs", 1,
        "--held-out", 0, "--run-dir", run, *options,
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert str(actor) not in result.stdout
    assert (run / "extractor" / "model.safetensors").is_file()
    refused = crl("sft", "--from", file, "--tasks", "room", "--set", f"actor.model={actor}")
    assert refused.exit_code == 2
    assert "actor.max_context_tokens" in refused.stderr


def test_the_extractor_does_not_learn_from_episodes(demonstrated: Path, tmp_path: Path) -> None:
    for source in (demonstrated, "scripted"):
        options = ("--role", "extractor", "--run-dir", tmp_path / "run")
        error = one_line(crl("sft", "--from", source, *options))
        assert f"--role = 'extractor': cannot learn from {source}" in error


def test_errors_of_the_chat_template_have_the_line(tiny_actor: Path, tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "talks.jsonl"
    shutil.copytree(tiny_actor, model)
    template = model / "chat_template.jinja"
    refusal = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad') }}{% endif %}"
    template.write_text(refusal + template.read_text("utf-8"), "utf-8")
    bad = TALK.replace('"a"', '"bad"')
    file.write_text(f"{TALK}\n\n{bad}\n", "utf-8")
    options = ("--tasks", "room", "--model", model, "--run-dir", tmp_path / "run")
    error = one_line(crl("sft", "--from", file, *options))
    assert f"--from = '{file}, line 3': the chat template of the model refuses" in error
    assert "(TemplateError: no bad)" in error


def test_files_of_other_encodings(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "go"}]}
    line = json.dumps(talk, ensure_ascii=False) + "\n"
    file, options = tmp_path / "talks.jsonl", ("--tasks", "room", "--held-out", 0, "--epochs", 1)
    file.write_bytes(line.encode("utf-8-sig"))
    with_mark = crl("sft", "--from", file, *options, "--run-dir", tmp_path / "with mark")
    assert "1 demonstration with" in with_mark.stdout
    file.write_bytes(line.encode("latin-1"))
    error = one_line(crl("sft", "--from", file, *options, "--run-dir", tmp_path / "latin"))
    assert f"{file}': is not a text in UTF-8" in error


def test_played_demonstrations_stay_if_the_training_cannot_begin(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = crl("sft", "--from", "scripted", "--tasks", "room", "--set", "rollout.groups=2",
                 "--steps", 1, "--held-out", 0.9, "--run-dir", run)  # fmt: skip
    assert "leaves nothing to train on: the demonstrations are of" in one_line(result)
    assert len(episodes(run)) == 16
