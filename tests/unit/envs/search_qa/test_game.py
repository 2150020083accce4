"""Game of search_qa in both renderings, its scripted player, and its prompt."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from crl.config.load import load
from crl.envs.base import ActionSpace, EnvSpec, Rendering, play_episode
from crl.envs.places import UNSEEN_LAYOUTS, fixed_tasks
from crl.envs.search_qa import SMALL_SPEC, SPEC
from crl.envs.search_qa.game import SearchGame
from crl.envs.search_qa.library import Library, Topics
from crl.envs.search_qa.player import Request, SearchPlayer, facts
from crl.envs.search_qa.questions import Document, Question, Topic
from crl.envs.search_qa.retrieval import BM25Retriever
from crl.errors import ConfigError
from crl.planning.context import chat_context
from crl.planning.tasks import specs
from crl.types import StepResult, StreamSettings, Task

DOCUMENTS = (
    Document("Velka", "Velka is a novel.", "velka: author norda"),
    Document("Norda", "Norda works at Savo.", "norda: workplace savo"),
)
QUESTIONS = (
    Question("Where does the author of Velka work?", ("Savo", "the Savo Inc."), "workplace"),
)
TASK = Task("search_qa", 0, "unseen", "goal", {"lgen": 5, "core": 0})


def game_of(rendering: Rendering, top_k: int = 2) -> SearchGame:
    topics = Topics([Topic("about the author of velka", QUESTIONS, "norda")], {})
    return SearchGame(rendering, Library(topics, BM25Retriever(DOCUMENTS)), top_k)


def test_an_episode_in_full() -> None:
    game = game_of("full")
    assert game.reset(TASK) == "Question: Where does the author of Velka work?"
    assert game.step("I look it up. <search> Velka\nnorda </search>") == StepResult(
        "<information>\n"
        "Doc 1 (Title: Velka) Velka is a novel.\n"
        "Doc 2 (Title: Norda) Norda works at Savo.\n"
        "</information>"
    )
    assert game.step("<search>zebra</search>") == StepResult(
        "<information>\nNo document was found.\n</information>"
    )
    assert game.step("<answer>The SAVO.</answer>") == StepResult(
        "The answer is right.", reward=1.0, done=True, success=True
    )
    with pytest.raises(RuntimeError, match="call reset first"):
        game.step("<answer>Savo</answer>")


def test_an_episode_in_compact() -> None:
    game = game_of("compact", top_k=1)
    assert game.reset(TASK) == "want workplace"
    assert game.step("search[ velka]") == StepResult("velka: author norda")
    assert game.step("search[zebra]") == StepResult("nothing")
    assert game.step("answer[ norda]") == StepResult("wrong.", done=True)
    assert game.reset(TASK) == "want workplace"
    assert game.step("answer[savo]").success


@pytest.mark.parametrize(
    ("rendering", "text"),
    [
        ("full", "Savo"),
        ("full", ""),
        ("full", "<answer></answer>"),
        ("full", "<answer> \n </answer>"),
        ("full", "<search>Velka"),
        ("full", "<search>Velka</answer>"),
        ("full", "search[Velka]"),
        ("full", "<search_and_ask>Velka</search_and_ask>"),
        ("compact", "savo"),
        ("compact", "answer[]"),
        ("compact", "buy[savo]"),
        ("compact", "<answer>savo</answer>"),
    ],
)
def test_a_text_without_an_action_is_invalid(rendering: Rendering, text: str) -> None:
    game = game_of(rendering)
    game.reset(TASK)
    result = game.step(text)
    assert (result.valid, result.done, result.reward) == (False, False, 0.0)
    expected = "unknown action." if rendering == "compact" else "Write <search>keywords</search>"
    assert expected in result.text


@pytest.mark.parametrize(
    ("text", "success"),
    [
        ("<answer>Norda</answer> No: <answer>Savo</answer>", True),
        ("<answer>Savo</answer> or <answer>Norda</answer>", False),
        ("<ANSWER>savo</ANSWER>", True),
        ("<answer>Savo <answer>Savo</answer>", True),
        ("<search>x</search><answer>Savo</answer>", True),
        ("<answer>Savo</answer> <answer></answer>", True),
    ],
)
def test_the_last_action_counts(text: str, success: bool) -> None:
    game = game_of("full")
    game.reset(TASK)
    result = game.step(text)
    assert result.done
    assert result.success == success


def test_a_search_after_an_answer_counts() -> None:
    game = game_of("full")
    game.reset(TASK)
    assert not game.step("<answer>Savo</answer> I check it: <search>velka</search>").done


# ── the scripted player ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spec", "rendering"), [(SPEC, "full"), (SMALL_SPEC, "full"), (SMALL_SPEC, "compact")]
)
def test_the_player_answers_every_question_from_the_documents(
    spec: EnvSpec, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that questions can be answered within the turn limit, by searching alone."""
    monkeypatch.delenv("SEARCH_QA_DATA", raising=False)
    game = spec.make_game(rendering)
    tasks = spec.tasks.eval_tasks("unseen", 300, 0, StreamSettings(permanent=0))
    played = [play_episode(game, task, SearchPlayer(random.Random(0)), 4) for task in tasks]
    assert all(episode.success for episode in played)
    assert {len(episode.actions) for episode in played} == {2, 3}


@pytest.mark.parametrize("preset", ["cpu", "node8"])
def test_an_episode_has_four_turns(preset: str) -> None:
    assert load(["search_qa"], preset=preset).tasks["search_qa"].max_turns == SPEC.turns == 4


def test_the_player_refuses_official_questions() -> None:
    with pytest.raises(ConfigError, match="is not of the generated world"):
        Request.read("who sang it", "Question: who sang it")


def test_facts_of_both_renderings() -> None:
    assert list(facts("velka: author norda, publisher savo\nnothing")) == [
        ("velka", "author", "norda"),
        ("velka", "publisher", "savo"),
    ]
    text = "Doc 1 (Title: Velka) Velka is a novel that was written by Norda."
    assert list(facts(text)) == [("velka", "author", "norda")]


# ── declaration ───────────────────────────────────────────────────────────────────────────────────


def test_the_prompt_asks_for_the_tags_of_the_task() -> None:
    config = load(["search_qa", "room"], preset="node8")
    context = chat_context(config.tasks, specs(config))
    own, other = context.instructions["search_qa"], context.instructions["room"]
    assert own.endswith(
        "exactly one action in its tags, for example:\n<search>capital of France</search>"
    )
    assert "4 turns" in own
    assert "answer tags" in other
    assert "answer tags" not in own


def test_tagged_actions_need_an_example() -> None:
    with pytest.raises(ValueError, match="need an example"):
        ActionSpace(description="<a>x</a>", tagged=True)


def test_tasks_are_the_same_in_every_process() -> None:
    code = (
        "from crl.envs.search_qa import SMALL_SPEC\n"
        "from crl.types import StreamSettings\n"
        "game = SMALL_SPEC.make_game('compact')\n"
        "for task in SMALL_SPEC.tasks.train_stream(1, StreamSettings()).draw(5):\n"
        "    name = task.goal.split()[-1]\n"
        "    print(task.goal, game.reset(task), game.step('search[' + name + ']').text)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("about the") == 5


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="seen or unseen"):
        SPEC.tasks.eval_tasks("train", 1, 0, StreamSettings())  # type: ignore[arg-type]
    (task,) = fixed_tasks("search_qa_small", "{place}", UNSEEN_LAYOUTS, 1)
    assert SMALL_SPEC.tasks.revisit
    assert {SMALL_SPEC.tasks.revisit(task, visit).params["core"] for visit in range(5)} != {
        task.params["core"]
    }
