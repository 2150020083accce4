"""Official data: questions and corpus as JSON lines in the folder that $SEARCH_QA_DATA names.

The question files have the form of FlashRAG's datasets, which Search-R1 reads too:

    corpus.jsonl                {"id": "0", "contents": "TITLE\\nTEXT"}
    SET/train.jsonl             {"question": "…", "golden_answers": ["…", …]}
    SET/test.jsonl, or SET/dev.jsonl

Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from crl.config.schema import QUESTION_SETS
from crl.envs.base import replace_surrogates
from crl.envs.search_qa.questions import Document, Question
from crl.envs.search_qa.scoring import normalised
from crl.errors import ConfigError
from crl.seeds import generator

VARIABLE = "SEARCH_QA_DATA"
"""Environment variable with the folder of the official data."""

CORPUS = "corpus.jsonl"
TRAIN_FILE, TEST_FILES = "train.jsonl", ("test.jsonl", "dev.jsonl")
"""Files of a set. The first of the test files that exists has the test questions (Search-R1)."""

LAYOUT = "docs/tasks.md describes the files"


def read_corpus(folder: Path) -> list[Document]:
    """Return all documents. Raise `ConfigError` for a missing file or a malformed line."""
    path = folder / CORPUS
    if not path.is_file():
        remedy = f"Add the file, or set search.retriever to http; {LAYOUT}"
        raise ConfigError(VARIABLE, str(folder), f"contains no {CORPUS}", remedy)
    documents = []
    for number, row in _rows(path):
        try:
            documents.append(read_document(row))
        except (KeyError, TypeError) as error:
            raise _malformed(path, number, "contents, or title and text, as strings") from error
    if not documents:
        raise ConfigError(VARIABLE, str(folder), f"{CORPUS} contains no document", LAYOUT)
    return documents


def read_document(row: Any) -> Document:
    """Return the document of a row with `contents`, or with `title` and `text`.

    The first line of `contents` is the title. Quotes around the title are removed, as they stand in
    Search-R1's corpus. Raise `KeyError` or `TypeError` for another form.
    """
    if "contents" in row:
        title, _, text = _text(row["contents"]).partition("\n")
    else:
        title, text = _text(row["title"]), _text(row["text"])
    return Document(title.strip().strip('"'), text.strip())


def training_questions(folder: Path, sets: Sequence[str], excluded: set[str]) -> list[Question]:
    """Return the training questions of the sets, without repetitions.

    `excluded`: normalised texts of test questions, which are left out. Raise `ConfigError` for a
    missing or malformed file, or if no question remains.
    """
    found: dict[str, Question] = {}
    left_out = 0
    for name in sets:
        for question in _read_questions(_required(folder, name, (TRAIN_FILE,))):
            if (text := normalised(question.text)) in excluded:
                left_out += 1
            else:
                found.setdefault(text, question)
    if not found:
        reason = f"has no training question in {', '.join(sets)}"
        if left_out:
            reason += f" that is not also a test question: {left_out:,} were left out"
        raise ConfigError(VARIABLE, str(folder), reason, LAYOUT)
    return list(found.values())


def evaluation_questions(folder: Path, sets: Sequence[str]) -> list[Question]:
    """Return the test questions of the sets; an empty sequence stands for all sets with a file.

    Each set is shuffled in the same way in every run. The sets take turns, so that the first
    questions have equal shares of all sets. Raise `ConfigError` for a missing or malformed file, or
    if there is no question.
    """
    named = sets or [name for name in QUESTION_SETS if _test_file(folder, name)]
    by_set = []
    for name in named:
        questions = list(_read_questions(_required(folder, name, TEST_FILES)))
        generator(0, "search_qa/test", name).shuffle(questions)
        by_set.append(questions)
    found = [question for row in zip_longest(*by_set) for question in row if question]
    if not found:
        reason = f"has no test question of any set ({', '.join(named or QUESTION_SETS)})"
        raise ConfigError(VARIABLE, str(folder), reason, LAYOUT)
    return found


def evaluation_texts(folder: Path) -> set[str]:
    """Return the normalised texts of the test questions of every set in the folder."""
    paths = (path for name in QUESTION_SETS if (path := _test_file(folder, name)))
    return {normalised(question.text) for path in paths for question in _read_questions(path)}


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if the folder does not exist or has no set."""
    if not any((folder / name).is_dir() for name in QUESTION_SETS):
        reason = f"contains none of the folders {', '.join(QUESTION_SETS)}"
        raise ConfigError(VARIABLE, str(folder), reason, LAYOUT)


def _test_file(folder: Path, name: str) -> Path | None:
    paths = (folder / name / file for file in TEST_FILES)
    return next((path for path in paths if path.is_file()), None)


def _required(folder: Path, name: str, files: Sequence[str]) -> Path:
    for file in files:
        if (path := folder / name / file).is_file():
            return path
    remedy = f"Add the file, or change search.train_sets or search.test_sets; {LAYOUT}"
    reason = f"contains no {name}/{' or '.join(files)}"
    raise ConfigError(VARIABLE, str(folder), reason, remedy)


def _read_questions(path: Path) -> Iterator[Question]:
    for number, row in _rows(path):
        try:
            text, answers = " ".join(_text(row["question"]).split()), row["golden_answers"]
            gold = tuple(_text(answer) for answer in answers) if isinstance(answers, list) else ()
        except (KeyError, TypeError) as error:
            expected = "a question, and golden_answers as a list of texts"
            raise _malformed(path, number, expected) from error
        if not text or not any(map(normalised, gold)):
            raise _malformed(path, number, "a question and a list of golden_answers, not empty")
        yield Question(text, gold)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the JSON objects of a file with their line numbers. Raise `ConfigError` if invalid."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise _malformed(path, number, "a JSON object")
                yield number, row
    except OSError as error:
        reason = f"{path.name} cannot be read ({error.strerror})"
        raise ConfigError(VARIABLE, str(path.parent), reason, LAYOUT) from error
    except ValueError as error:
        reason = f"{path.name} is not a text in UTF-8 ({error})"
        raise ConfigError(VARIABLE, str(path.parent), reason, LAYOUT) from error


def _text(value: object) -> str:
    """Return a string without lone surrogates. Raise `TypeError` for any other value."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    return replace_surrogates(value)


def _malformed(path: Path, number: int, expected: str) -> ConfigError:
    reason = f"line {number} of {path.name} must contain {expected}"
    return ConfigError(VARIABLE, str(path.parent), reason, f"Correct the line; {LAYOUT}")
