"""Training data of the tiny models for the shop: visits, their lessons, and the length limits."""

from __future__ import annotations

import random
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.lessons import (
    LESSONS,
    digest,
    lesson,
    read,
    right_brand,
    similar_brands,
    wrong_brands,
)
from crl.envs.webshop.player import Requirements, links
from crl.manager.distillation.ops import parse_ops
from crl.methods.parts.asking import COMPACT_CALL
from crl.modeling.demonstrations import Demonstration, demonstrated_traces
from crl.modeling.tokens import ChatRenderer
from crl.tiny.drills.drill import Episode, distil_prompt
from crl.tiny.drills.webshop import (
    ACTOR_DRILLS,
    EXTRACTOR_DRILLS,
    answer,
    lessons,
    refinements,
)
from crl.tiny.drills.webshop_visits import (
    ACTOR_VISITS,
    ASKING_VISITS,
    CHOICE_VISITS,
    TURNS,
    buy_cheapest,
    buy_first,
    buy_incomplete,
    demonstration_shops,
    demonstration_task,
    follower,
)
from crl.tiny.new_models import END, train_tokenizer

COMPACT = tomllib.loads(Path("tasks/webshop.toml").read_text())["compact"]


@pytest.fixture(scope="module")
def visits() -> list[Episode]:
    return list(ACTOR_VISITS.episodes(random.Random(1), 500))


def actions(episode: Episode) -> list[str]:
    return [segment.text for segment in episode.segments if segment.origin == "policy"]


def visits_with(visits: list[Episode], kind: str) -> list[Episode]:
    return [visit for visit in visits if visit.hint and read(visit.hint.text)[0] == kind]


def win_rate(visits: list[Episode]) -> float:
    return sum(visit.success for visit in visits) / len(visits)


# ── visits ────────────────────────────────────────────────────────────────────────────────────────


def test_visits_are_the_actors_conversations(visits: list[Episode]) -> None:
    """Check that a visit opens with the goal, the hint and the first observation, like an episode.

    Valid actions and their results follow.
    """
    assert COMPACT["max_turns"] == TURNS
    for visit in visits:
        opening = [segment.origin for segment in visit.segments[: 3 if visit.hint else 2]]
        assert opening == ["task", *(["experience"] if visit.hint else []), "env"]
        turns = visit.segments[len(opening) :]
        assert [segment.origin for segment in turns] == ["policy", "env"] * (len(turns) // 2)
        assert 3 <= len(turns) // 2 <= TURNS
        assert not any("unknown action" in segment.text for segment in turns)
        assert visit.success == (turns[-1].text == "bought. score 100")


def test_success_of_visits_by_advice(visits: list[Episode]) -> None:
    """Check that visits without advice win often enough, but leave something to learn for RL.

    Right advice wins and wrong advice loses.
    """
    free, advised = [visit for visit in visits if visit.hint is None], visits_with(visits, "buy")
    by_correctness = defaultdict(list)
    for visit in advised:
        right = any(
            similar_brands(shop, visit.task)[0] == read(visit.hint.text)[1]
            for shop in demonstration_shops()
            if visit.hint and shop.need(int(visit.task.params["lgen"])).text == visit.task.goal
        )  # fmt: skip
        by_correctness[right].append(visit)
    assert 0.3 <= win_rate(free) <= 0.6
    assert win_rate(by_correctness[True]) >= 0.9
    assert win_rate(by_correctness[False]) <= 0.2
    assert 0.2 <= len(advised) / len(visits) <= 0.6


def test_an_advised_product_is_bought(visits: list[Episode]) -> None:
    for visit in visits_with(visits, "buy"):
        assert visit.hint is not None
        _, name = read(visit.hint.text)
        assert actions(visit)[1] == f"click[ {name}]"
        assert actions(visit)[-1] == "click[ buy now]"


def test_choices_are_the_beginnings_of_visits() -> None:
    """Check that a choice is a search, a product and, for a product of the right kind, an option.

    Most choices have a hint that names the product.
    """
    choices = list(CHOICE_VISITS.episodes(random.Random(5), 200))
    assert all(len(actions(choice)) <= 3 for choice in choices)
    assert len(visits_with(choices, "buy")) >= 140
    for choice in visits_with(choices, "buy"):
        assert choice.hint is not None
        assert actions(choice)[1] == f"click[ {read(choice.hint.text)[1]}]"


@pytest.mark.parametrize(("kind", "min_share"), [("read", 0.75), ("skip", 0.9)])
def test_other_lessons_are_mostly_followed(kind: str, min_share: float) -> None:
    advised = visits_with(list(ACTOR_VISITS.episodes(random.Random(2), 1500)), kind)
    if kind == "read":
        assert win_rate(advised) >= min_share
        return
    avoided = [
        f"click[ {read(visit.hint.text)[1]}]" not in actions(visit)
        for visit in advised
        if visit.hint
    ]
    assert sum(avoided) / len(avoided) >= min_share - 0.15


def play_persona(persona, seed: int = 3) -> tuple[list[str], list[str]]:
    """Return the actions of a persona after its search, and the pages that it saw."""
    shop, rng = demonstration_shops()[0], random.Random(seed)
    task = demonstration_task(shop, rng)
    game = WebShopGame("compact", shop)
    requirements = Requirements.read(task.goal, game.reset(task))
    pages = [game.step(f"search[{requirements.query}]").text]
    visit, taken = persona(requirements, pages[0], rng), []
    taken.append(next(visit))
    while not (result := game.step(taken[-1])).done:
        pages.append(result.text)
        taken.append(visit.send(result.text))
    return taken, pages


def test_personas() -> None:
    taken, (page, *_) = play_persona(buy_first)
    assert taken[0] == f"click[{page.split()[1]}]"
    assert len(taken) == 4
    taken, (page, *_) = play_persona(buy_incomplete)
    assert len(taken) == 3
    taken, (page, *_) = play_persona(buy_cheapest)
    prices = {link.name: link.price for link in links(page) if not link.title}
    assert taken[0] == f"click[{min(prices, key=lambda name: prices[name])}]"
    taken, (page, *_) = play_persona(follower("nobody", buy_first))
    assert taken[0] == f"click[{page.split()[1]}]"


def test_agents_ask_at_the_start_and_follow_the_reply() -> None:
    asked = 0
    for visit in ASKING_VISITS.episodes(random.Random(4), 200):
        messages = [
            segment
            for segment in visit.segments
            if segment.origin in ("policy", "tool_call", "tool_result")
        ]
        asked += messages[0].origin == "tool_call"
        if messages[0].origin == "tool_call":
            assert messages[0].text == COMPACT_CALL
            kind, name = read(messages[1].text)
            assert kind != "buy" or actions(visit)[1] == f"click[ {name}]"
        assert not any(segment.origin == "tool_call" for segment in messages[1:])
    assert 60 <= asked <= 140


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


def test_lessons_are_true_of_their_visits(visits: list[Episode]) -> None:
    for visit in visits:
        right, wrong = right_brand(visit.segments), wrong_brands(visit.segments)
        (buy,) = parse_ops(answer("buy", visit), num_shown=1 if visit.hint else 0).ops
        (skip,) = parse_ops(answer("skip", visit), num_shown=1 if visit.hint else 0).ops
        assert buy.text == (lesson("buy", right) if right else "")
        assert skip.text == (lesson("skip", wrong[0]) if wrong else "")
        kind, name = read(visit.hint.text) if visit.hint else ("", None)
        assert buy.kind == (
            "return" if not right else "update" if kind == "buy" and name != right else "add"
        )
        assert answer("careful", visit) == '[{"op":"add","text":"be careful."}]'


def test_kinds_of_lessons_are_equally_frequent() -> None:
    kinds = Counter[str]()
    for prompt, answer_segment in lessons(random.Random(2), 700):
        (op,) = parse_ops(answer_segment.text, num_shown=1 if "\nhint 1 " in prompt.text else 0).ops
        kinds[read(op.text)[0] if op.text else "return"] += 1
    for kind in set(LESSONS) - {"buy", "skip"}:
        assert kinds[kind] / 700 == pytest.approx(1 / len(LESSONS), abs=0.04)
    assert min(kinds["buy"], kinds["skip"]) >= 30


def test_the_distillation_prompt(visits: list[Episode]) -> None:
    visit = next(visit for visit in visits if visit.hint and visit.success)
    (prompt,) = distil_prompt(digest, visit)
    assert (
        prompt.text == f"{visit.task.goal}\n"
        f"hint 1 {visit.hint.text}\n"  # pyright: ignore[reportOptionalMemberAccess]
        f"{digest(visit.segments)}\nsuccess"
    )


def test_a_lesson_on_a_need_is_not_adapted() -> None:
    for prompt, answer_segment in refinements(random.Random(5), 20):
        assert prompt.text.splitlines()[-1] == COMPACT_CALL
        assert answer_segment.text == '[{"op":"return"}]'


# ── length ────────────────────────────────────────────────────────────────────────────────────────


def test_demonstrations_fit_into_the_limits_of_a_run() -> None:
    """Check that a conversation has at most 300 tokens on average and 900 at most.

    No answer is truncated.
    """
    by_drill: dict[str, list[Demonstration]] = {
        drill.name: list(drill.make(random.Random(6), 150))
        for drill in (*ACTOR_DRILLS, *EXTRACTOR_DRILLS)
    }
    tokenizer = train_tokenizer(
        [x for demonstrations in by_drill.values() for x in demonstrations], 512
    )
    chat = ChatRenderer(tokenizer, [tokenizer.get_vocab()[END]])
    limits = {
        "shop visits": COMPACT["max_response_tokens"],
        "shop visits with questions": COMPACT["max_response_tokens"],
        "shop verdicts": 24,
    }
    for name, demonstrations in by_drill.items():
        lengths = [len(t.ids) for x in demonstrations for t in demonstrated_traces(x, chat)]
        assert max(lengths) <= 900
        assert sum(lengths) / len(lengths) <= 300
        answers = [
            len(chat.encode(segment.text)) + 1
            for x in demonstrations
            for segment in x
            if segment.origin == "policy"
        ]
        assert max(answers) <= limits.get(name, 40)
