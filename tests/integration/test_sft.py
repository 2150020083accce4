"""Supervised fine-tuning: `crl sft`, and demonstrations by `crl rollout --scripted`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from crl.config.models import model_profile, resolve_model
from crl.modeling.loading import load_tokenizer
from support.documented_metrics import undocumented
from support.whole_runs import crl, episodes, lines, metrics, one_line

TASK = ("--tasks", "room", "--set", "rollout.groups=8", "--set", "rollout.group_size=4")
FAST = ("--learning-rate", "1e-3")
INVALID_LINES = (
    "no JSON",
    '{"messages": []}',
    '{"messages": [{"role": "user", "content": "a"}]}',
    '{"messages": [{"role": "tool", "content": "a"}]}',
    '{"messages": [{"role": 1}]}',
    '{"messages": [{"role": "assistant", "content": "a"}]}',
)


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
    for line in INVALID_LINES:
        file.write_text(json.dumps({"messages": talks[0]}) + "\n\n" + line + "\n", "utf-8")
        error = one_line(
            crl("sft", "--from", file, "--tasks", "room", "--run-dir", tmp_path / "none")
        )
        assert f"{file}, line 3': is not a conversation in which the assistant answers" in error
        assert not (tmp_path / "none" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "scripted"], "--tasks = None: is required for scripted"),
        (["--from", "no/such"], "is neither scripted, nor a run, nor a file"),
        (["--from", "scripted", "--tasks", "river,river"], "river"),
    ],
)
def test_requests_that_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in one_line(crl("sft", *options, "--run-dir", tmp_path / "run"))


def test_demonstrations_that_cannot_be_used(demonstrated: Path, tmp_path: Path) -> None:
    def error(*options: object) -> str:
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return one_line(crl("sft", "--from", demonstrated, *options, "--run-dir", run))

    assert "does not apply to recorded episodes" in error("--tasks", "room")
    assert "has no demonstration to train on" in error("--set", "actor.max_context_tokens=26")
    assert "--held-out = 1.5: leaves nothing to train on" in error("--held-out", 1.5)
    assert "actor.kl_coef = 0.05: does not apply" in error("--set", "actor.kl_coef=0.05")
    assert "actor.temperature = 2.0: does not apply" in error("--set", "actor.temperature=2.0")
    assert "no epoch has a lower held-out loss" in error("--learning-rate", 0)


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
