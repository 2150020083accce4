"""Runs whose bank is searched by an encoder or by word vectors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from support.bank_commands import finished_run
from support.whole_runs import DETERMINISTIC, SMALL, arguments, crl, metrics, one_line, untimed

# These lessons claim nothing. The extractor may correct a lesson that names a direction.
LESSONS = [
    {"task": "room", "goal": "Room: the dusty cabin.", "text": text}
    for text in ("every move takes time.", "be careful.")
]


def test_a_run_with_an_encoder_embeds_its_bank_and_is_reproducible(
    tmp_path: Path, random_bert: Path
):
    lessons, bank = tmp_path / "lessons.jsonl", tmp_path / "bank.sqlite"
    lessons.write_text(
        "".join(json.dumps(lesson) + "\n" for lesson in [{"crl_bank": 1}, *LESSONS]), "utf-8"
    )
    assert crl("bank", "import", bank, lessons).exit_code == 0
    runs = tmp_path / "a", tmp_path / "b"
    for run in runs:
        settings = (
            *SMALL,
            *DETERMINISTIC,
            f"embedder.model={random_bert}",
            f"bank.init={bank}",
            "retrieval.min_similarity=-1.0",
        )
        result = crl(*arguments(run, "room", settings, 2, 0, "complementary"))
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        assert result.stdout.count("embedding 2 experiences of the bank\n") == 1
    found = [[untimed(line) for line in metrics(run, "bank")] for run in runs]
    assert found[0] == found[1]
    assert found[0][-1]["bank/size"] > 2
    found = crl("bank", "search", runs[0], "Room: the dusty cabin.", "--limit", "0", "--json")
    assert {lesson["text"] for lesson in LESSONS} <= {
        row["text"] for row in json.loads(found.stdout)
    }
    assert json.loads(crl("bank", "stats", runs[0], "--json").stdout)["keys"].startswith("bert-")


def test_a_run_with_an_unreachable_endpoint_does_not_start(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("crl.embedders.endpoint.ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    settings = (*SMALL, "embedder.model=http://127.0.0.1:9/v1", "embedder.name=words")
    result = crl(*arguments(tmp_path / "run", "room", settings, 1, 0, "complementary"))
    assert result.exit_code == 2
    assert "embedder.model = 'http://127.0.0.1:9/v1': " in one_line(result)
    assert list((tmp_path / "run").iterdir()) == []


AS_LANGUAGE_MODEL = (
    *SMALL,
    "actor.profile=full",
    "actor.max_context_tokens=1024",
    "tasks.room.rendering=compact",
    "tasks.room.max_turns=4",
    "tasks.room.max_response_tokens=4",
)


def vectors_of(run: Path) -> str:
    return json.loads(crl("bank", "stats", run, "--json").stdout)["keys"]


def test_a_run_of_a_language_model_embeds_the_bank_of_tiny_models_again_and_says_so(
    tmp_path: Path,
):
    first, run = finished_run(tmp_path / "first"), tmp_path / "run"
    before = vectors_of(first)
    settings = (*AS_LANGUAGE_MODEL, f"bank.init={first / 'bank.sqlite'}")
    result = crl(*arguments(run, "room", settings, 1, 0, "complementary"))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "experiences of the bank again (hash-char_wb-2-4-384: goal + 0.1 text → wordllama-" in (
        result.stdout
    )
    assert vectors_of(run).startswith("wordllama-")
    assert vectors_of(first) == before
    resumed = crl("resume", run, "--steps", "2")
    assert (resumed.exit_code, resumed.stderr) == (0, ""), resumed.output
    assert "embedding" not in resumed.stdout


def test_a_run_of_a_language_model_names_the_extra_that_is_missing(tmp_path: Path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *package: None if name == "wordllama" else find_spec(name, *package),
    )
    run = tmp_path / "run"
    result = crl(*arguments(run, "room", AS_LANGUAGE_MODEL, 1, 0, "complementary"))
    assert (result.exit_code, one_line(result)) == (
        2,
        "error: embedder.model = 'wordllama': it needs the extra 'wordllama', which is not "
        "installed. Run pip install 'crl[wordllama]', or add --set embedder.model=hash, which "
        "compares wording alone.\n",
    )
    settings = (*AS_LANGUAGE_MODEL, "embedder.model=hash")
    result = crl(*arguments(run, "room", settings, 1, 0, "complementary"))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert vectors_of(run) == "hash-char_wb-2-4-384"
