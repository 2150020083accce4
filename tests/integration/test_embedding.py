"""Run whose bank is searched by an encoder."""

from __future__ import annotations

import json
from pathlib import Path

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
