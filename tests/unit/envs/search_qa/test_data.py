"""Official data of search_qa."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from crl.config import load
from crl.config.schema import QUESTION_SETS
from crl.envs.base import StreamSettings
from crl.envs.places import UNSEEN_LAYOUTS
from crl.envs.search_qa import SMALL_SPEC, SPEC, data
from crl.envs.search_qa.library import official_topics
from crl.envs.search_qa.questions import Document, Question
from crl.envs.search_qa.tasks import data as data_in_use
from crl.errors import ConfigError
from crl.planning.tasks import data_notes, specs
from support.paths import SEARCH_QA_DATA

PAPER = StreamSettings(places=32, permanent=0, visits=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Return a copy of the small data, which search_qa uses."""
    target = tmp_path / "data"
    shutil.copytree(SEARCH_QA_DATA, target)
    monkeypatch.setenv("SEARCH_QA_DATA", str(target))
    return target


def texts(questions: list[Question]) -> list[str]:
    return [question.text for question in questions]


def test_the_corpus_of_both_forms() -> None:
    corpus = data.read_corpus(SEARCH_QA_DATA)
    assert corpus[1:] == [
        Document("Warsaw", "Warsaw is the capital of Poland."),
        Document("Seine", "The Seine is a river in France. It flows through Paris."),
    ]
    assert corpus[0].title == "Marie Curie"


def test_train_questions_repeat_no_test_question() -> None:
    topics = official_topics(SEARCH_QA_DATA, ["nq", "hotpotqa"], [])
    assert [topic.goal for topic in topics.train] == [
        "which river flows through paris",
        "In which country is the river that flows through Paris?",
    ], "What is the capital of Poland? is a test question in other letters"
    tests = topics.reserved[UNSEEN_LAYOUTS]
    assert len(tests) == topics.official_tests == 3
    assert not {topic.goal for topic in topics.train} & {topic.goal for topic in tests}
    # test questions of sets that are not evaluated are left out, too
    assert official_topics(SEARCH_QA_DATA, ["nq"], ["hotpotqa"]).train == topics.train[:1]


def test_training_questions_that_are_all_test_questions() -> None:
    questions = texts(data.training_questions(SEARCH_QA_DATA, ["nq"], set()))
    excluded = {data.normalised(text) for text in questions}
    left_out = f"that is not also a test question: {len(excluded)} were left out"
    with pytest.raises(ConfigError, match=f"has no training question in nq {left_out}"):
        data.training_questions(SEARCH_QA_DATA, ["nq"], excluded)


def test_the_sets_take_turns() -> None:
    found = texts(data.evaluation_questions(SEARCH_QA_DATA, ["hotpotqa", "nq"]))
    assert found[0].startswith("Of which country")
    assert len(found) == 3
    assert found == texts(data.evaluation_questions(SEARCH_QA_DATA, ["hotpotqa", "nq"]))


def test_tasks_on_official_data(folder: Path) -> None:
    assert data_in_use().official
    assert SPEC.tasks.split_sizes
    assert SPEC.tasks.split_sizes() == {"unseen": 3}
    unseen = SPEC.tasks.eval_tasks("unseen", 3, 0, PAPER)
    drawn = SPEC.tasks.train_stream(0, PAPER).draw(20)
    assert len({task.goal for task in unseen}) == 3
    with pytest.raises(
        ValueError, match="4 questions were requested, but the official data has only 3"
    ):
        SPEC.tasks.eval_tasks("unseen", 4, 0, PAPER)
    assert not {task.goal for task in unseen} & {task.goal for task in drawn}
    game = SPEC.make_game("full")
    task = next(task for task in unseen if "birthplace" in task.goal)
    assert game.reset(task) == f"Question: {task.goal}"
    found = game.step("I need her birthplace. <search>Marie Curie</search>").text
    assert found.startswith("<information>\nDoc 1 (Title: Marie Curie) Marie Curie was")
    assert game.step("<answer>poland.</answer>").success


def test_tiny_models_always_play_the_generated_world(folder: Path) -> None:
    (task,) = SMALL_SPEC.tasks.eval_tasks("unseen", 1, 0, PAPER)
    assert task.goal.startswith("about the ")
    assert "generated world" in data_notes({"small": SMALL_SPEC})["small"]
    config = load(["search_qa"], sets=['tasks.search_qa.search.test_sets=["nq"]'])
    with pytest.raises(ConfigError, match=r"tasks\.search_qa\.search\.test_sets = .*no effect"):
        specs(config)


def test_without_data_the_world_is_generated(monkeypatch) -> None:
    monkeypatch.delenv("SEARCH_QA_DATA", raising=False)
    assert not data_in_use().official
    assert "5,000 documents" in data_in_use().description
    assert SPEC.tasks.split_sizes
    assert SPEC.tasks.split_sizes() == {}


def test_the_first_line_of_the_documentation_is_the_test_data() -> None:
    """Check that docs/tasks.md quotes lines of the small data."""
    page = (SEARCH_QA_DATA.parents[1] / "docs" / "tasks.md").read_text("utf-8")
    for name in ("corpus.jsonl", "nq/train.jsonl", "hotpotqa/dev.jsonl"):
        line = (SEARCH_QA_DATA / name).read_text("utf-8").splitlines()[0]
        assert line in page, f"the first line of {name}"
    assert all(f"`{name}`" in page for name in QUESTION_SETS)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_data_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SEARCH_QA_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="contains none of the folders nq, triviaqa"):
        data_in_use()
    monkeypatch.setenv("SEARCH_QA_DATA", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="is not a folder"):
        data_in_use()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus.jsonl", "contains no corpus.jsonl. Add the file, or set search.retriever to http"),
        ("nq/train.jsonl", "contains no nq/train.jsonl. Add the file, or change search.train_sets"),
    ],
)
def test_missing_files_are_named(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=message):
        SPEC.tasks.eval_tasks("unseen", 1, 0, PAPER)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("nq/train.jsonl", "{", "line 3 of train.jsonl must contain a JSON object"),
        ("nq/train.jsonl", "[]", "line 3 of train.jsonl must contain a JSON object"),
        ("nq/test.jsonl", '{"question": "x"}', "line 3 of test.jsonl must contain a question, and"),
        ("nq/test.jsonl", '{"question": "x", "golden_answers": []}', "not empty"),
        ("nq/test.jsonl", '{"question": "x", "golden_answers": [" "]}', "not empty"),
        ("nq/test.jsonl", '{"question": "x", "golden_answers": "y"}', "not empty"),
        ("nq/test.jsonl", '{"question": " ", "golden_answers": ["y"]}', "not empty"),
        (
            "nq/test.jsonl",
            '{"question": 5, "golden_answers": ["y"]}',
            "must contain a question, and",
        ),
        ("corpus.jsonl", '{"id": "4"}', "line 4 of corpus.jsonl must contain contents"),
        ("corpus.jsonl", '{"contents": 4}', "line 4 of corpus.jsonl must contain contents"),
        ("corpus.jsonl", "\ufeff\xff", "corpus.jsonl is not a text in UTF-8"),
    ],
)
def test_malformed_lines_are_named(folder: Path, name: str, line: str, message: str) -> None:
    with (folder / name).open("a", encoding="latin-1" if "\xff" in line else "utf-8") as file:
        file.write("\xff\n" if "\xff" in line else f"{line}\n")
    with pytest.raises(ConfigError, match=message):
        SPEC.tasks.eval_tasks("unseen", 1, 0, PAPER)


def test_a_byte_order_mark_is_no_part_of_the_first_line(folder: Path) -> None:
    for path in folder.rglob("*.jsonl"):
        path.write_text(path.read_text("utf-8"), "utf-8-sig")
    assert SPEC.tasks.eval_tasks("unseen", 1, 0, PAPER)


def test_an_empty_corpus_is_refused(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no document"):
        SPEC.tasks.eval_tasks("unseen", 1, 0, PAPER)


def test_lone_surrogates_are_replaced(folder: Path) -> None:
    row = json.dumps({"question": "why \ud800", "golden_answers": ["b"]})
    (folder / "nq" / "test.jsonl").write_text(f"{row}\n")
    goals = {task.goal for task in SPEC.tasks.eval_tasks("unseen", 2, 0, PAPER)}
    assert "why \ufffd" in goals


@pytest.mark.parametrize("answer", ["A", "The The", "!"])
def test_an_answer_of_articles_or_punctuation_is_valid(folder: Path, answer: str) -> None:
    row = json.dumps({"question": "which vitamin helps the eyes", "golden_answers": [answer, ""]})
    (folder / "nq" / "test.jsonl").write_text(f"{row}\n")
    goals = {task.goal for task in SPEC.tasks.eval_tasks("unseen", 2, 0, PAPER)}
    assert "which vitamin helps the eyes" in goals
