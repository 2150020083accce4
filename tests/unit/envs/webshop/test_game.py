"""WebShop: determinism, pages equal to the original's, and purchases through these pages."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.envs.base import Rendering, StreamSettings, play_episode
from crl.envs.hosting.threads import ThreadHost
from crl.envs.webshop import SPEC
from crl.envs.webshop.catalogue import Product
from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.shop import open_shop
from crl.envs.webshop.tasks import WebShopStream, eval_tasks, probe_tasks
from crl.envs.webshop.text import RENDERERS
from crl.errors import ConfigError
from crl.types import StepResult, Task
from support.paths import WEBSHOP_DATA, python_environment
from support.shipped_tasks import scripted_player, shipped_task
from support.webshop_visits import PAPER, UNSEEN, any_action, transcript

PERSISTENT = StreamSettings(places=32, permanent=8, visits=5)
RENDERINGS: tuple[Rendering, ...] = ("full", "compact")
JUMPSUIT = "Find me slim fit, machine wash women's jumpsuits"


def steps(game: WebShopGame, *actions: str) -> list[StepResult]:
    return [game.step(action) for action in actions]


# ── determinism ───────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=20, deadline=None)
@given(
    history=st.lists(st.integers(0, 149), max_size=4),
    number=st.integers(0, 149),
    rendering=st.sampled_from(RENDERINGS),
)
def test_the_same_task_is_the_same_visit_after_any_history(
    history: list[int], number: int, rendering: Rendering
) -> None:
    expected = transcript(WebShopGame(rendering), UNSEEN[number])
    game = WebShopGame(rendering)
    for before in history:
        transcript(game, UNSEEN[before], turns=before % 7)
    assert transcript(game, UNSEEN[number]) == expected


def test_the_same_task_is_the_same_visit_in_another_process() -> None:
    code = (
        "import json; from crl.envs.webshop.game import WebShopGame; "
        "from support.webshop_visits import UNSEEN, transcript\n"
        "game = WebShopGame('full'); "
        "print(json.dumps([transcript(game, task) for task in reversed(UNSEEN[:8])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [
        transcript(WebShopGame("full"), task) for task in reversed(UNSEEN[:8])
    ]
    assert done.stderr == "", "games must not print"


def test_games_in_many_threads_share_one_shop_and_do_not_interfere() -> None:
    expected = [transcript(WebShopGame("full"), task) for task in UNSEEN[:64]]
    games = [WebShopGame("full") for _ in UNSEEN[:64]]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(transcript, games, UNSEEN[:64])) == expected
    assert len({id(game._shop) for game in games}) == 1


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Return the task of the jumpsuit in the original's files."""
    monkeypatch.setenv("WEBSHOP_DATA", str(WEBSHOP_DATA))
    shop = open_shop()
    lgen = next(n for n in range(10**9, 10**9 + 10_000) if shop.need(n).text == JUMPSUIT)
    return Task("webshop", 0, "train", JUMPSUIT, {"lgen": lgen, "core": 0})


def test_the_full_pages(original: Task) -> None:
    game = WebShopGame("full")
    first = game.reset(original)
    head = re.fullmatch(r"WebShop \[SEP\] (Instruction: \[SEP\] .*) \[SEP\] Search", first)
    assert head is not None
    wanted = f"{JUMPSUIT} with color: navy blue, and size: small, and price lower than "
    assert re.fullmatch(re.escape(f"Instruction: [SEP] {wanted}") + r"[4-7]0\.00 dollars", head[1])
    pages = [result.text.removeprefix(f"{head[1]} [SEP] ") for result in steps(
        game, "search[Jumpsuit]", "click[B000000001]", "click[Navy Blue]", "click[features]",
        "click[< Prev]", "click[Description]", "click[< prev]", "click[reviews]", "click[< prev]",
        "click[< prev]", "click[b000000002]", "click[description]", "click[back to search]",
    )]  # fmt: skip
    jumpsuit = (
        "Back to Search [SEP] < Prev [SEP] color [SEP] navy blue [SEP] black | white"
        " [SEP] size [SEP] small [SEP] x-large"
        " [SEP] Acme Women's Jumpsuit, Slim Fit Summer Romper"
        " [SEP] Price: $25.0 to $35.0 [SEP] Rating: N.A."
        " [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    results = (
        "Back to Search [SEP] Page 1 (Total results: 2)"
        " [SEP] B000000002 [SEP] Bolt Women's Jumpsuit with Pockets [SEP] $19.99"
        " [SEP] B000000001 [SEP] Acme Women's Jumpsuit, Slim Fit Summer Romper [SEP] $25.0 to $35.0"
    )
    back = "Back to Search [SEP] < Prev [SEP] "
    assert pages == [
        results, jumpsuit, jumpsuit,
        f"{back}Machine wash cold [SEP] Elastic waist [SEP] Made of cotton", jumpsuit,
        f"{back}Light and airy.", jumpsuit, f"{back}No Reviews", jumpsuit, results,
        f"{back}color [SEP] red [SEP] Bolt Women's Jumpsuit with Pockets [SEP] Price: $19.99"
        " [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now",
        f"{back}No Description", first,
    ]  # fmt: skip


def test_the_compact_pages(original: Task) -> None:
    game = WebShopGame("compact")
    first = game.reset(original)
    assert re.fullmatch(r"want color navy blue, size small, under [4-7]0", first)
    pages = [result.text for result in steps(
        game, "search[women's jumpsuit]", "click[acme]", "click[small]", "click[features]",
        "click[< prev]", "click[description]", "click[back to search]", "search[zebra]",
    )]  # fmt: skip
    assert pages == [
        "found bolt with pockets 19.99, acme 25-35",
        "color: navy blue black | white\nsize: small x-large\n"
        "has machine wash cold, elastic waist, made of cotton",
        "chosen small", "machine wash cold, elastic waist, made of cotton", "chosen small",
        "light and airy.", first, "found nothing",
    ]  # fmt: skip


def test_pages_of_results_can_be_turned() -> None:
    game = WebShopGame("full")
    game.reset(UNSEEN[0])
    one, two, *_, five = steps(game, "search[everyday]", *["click[Next >]"] * 4)
    assert "Page 1 (Total results: 50) [SEP] Next > [SEP]" in one.text
    assert "Page 2 (Total results: 50) [SEP] < Prev [SEP] Next > [SEP]" in two.text
    assert "Page 5 (Total results: 50) [SEP] < Prev [SEP] B0" in five.text
    assert not game.step("click[next >]").valid
    codes = [re.findall(r"\[SEP\] (B0\w{8}) \[SEP\]", page.text) for page in (one, two, five)]
    assert [len(set(found)) for found in codes] == [10, 10, 10]
    assert not set(codes[0]) & set(codes[1])
    item, back = steps(game, f"click[{codes[2][3]}]", "click[< prev]")
    assert item.valid
    assert back.text == five.text, "the page that contained the item"
    assert game.step("click[< prev]").text.startswith(two.text.split(" [SEP] Back")[0])


def test_compact_links_of_one_brand_are_numbered() -> None:
    game = WebShopGame("compact")
    for task in UNSEEN[:40]:
        game.reset(task)
        page = game.step(f"search[{task.goal.split()[2]}]").text.removeprefix("found ")
        links = [found.split()[0] for found in page.split(", ") if found != "next >"]
        assert len(set(links)) == len(links) == 5
        assert all(re.fullmatch(r"[a-z]+\d?", link) for link in links)


@pytest.mark.parametrize(
    ("brands", "links"),
    [
        (["acme", "acme", "acme2"], ["acme", "acme3", "acme2"]),
        (["acme2", "acme", "acme", "acme"], ["acme2", "acme", "acme3", "acme4"]),
        (["acme", "bolt", "acme", "bolt"], ["acme", "bolt", "acme2", "bolt2"]),
    ],
)
def test_a_numbered_brand_never_equals_another_brand(brands: list[str], links: list[str]) -> None:
    found = [cast("Product", {"asin": "", "Title": f"{name} tent, green"}) for name in brands]
    assert RENDERERS["compact"].name_links(found) == links


# ── buying ────────────────────────────────────────────────────────────────────────────────────────


def buy(task: Task, *actions: str, rendering: Rendering = "full") -> StepResult:
    game = WebShopGame(rendering)
    game.reset(task)
    *before, last = steps(game, *actions, "click[buy now]")
    assert all(result.valid and not result.done and result.score == 0.0 for result in before)
    return last


def test_a_perfect_purchase_is_a_success(original: Task) -> None:
    bought = buy(
        original, "search[jumpsuit]", "click[b000000001]", "click[small]", "click[navy blue]"
    )
    assert (bought.reward, bought.success, bought.score, bought.done) == (1.0, True, 1.0, True)
    assert (
        bought.text == "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1"
    )


def test_an_imperfect_purchase_gets_a_partial_score(original: Task) -> None:
    last_click_counts = (
        "click[x-large]",
        "click[black | white]",
        "click[small]",
        "click[navy blue]",
    )
    assert buy(original, "search[jumpsuit]", "click[b000000001]", *last_click_counts).success
    unchosen = buy(original, "search[jumpsuit]", "click[b000000001]", "click[small]")
    assert (unchosen.reward, unchosen.success, unchosen.score) == (0.0, False, 0.8)
    assert unchosen.text.endswith("0.8")
    assert (
        buy(original, "search[jumpsuit]", "click[acme]", rendering="compact").text
        == "bought. score 60"
    )
    open_it = ("search[jumpsuit]", "click[b000000001]")
    forgotten = buy(
        original, *open_it, "click[small]", "click[< prev]", open_it[1], "click[navy blue]"
    )
    assert forgotten.score == 0.8, "options are reset when the item is left"


def test_a_step_after_the_end_is_an_error(original: Task) -> None:
    game = WebShopGame("full")
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("search[jumpsuit]")
    game.reset(original)
    steps(game, "search[jumpsuit]", "click[b000000001]", "click[buy now]")
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("search[jumpsuit]")


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unavailable_action_changes_nothing_and_is_reported(original: Task) -> None:
    game = WebShopGame("full")
    first = game.reset(original)
    refused = game.step("click[buy now]")
    assert (refused.valid, refused.reward, refused.score, refused.done, game.moves) == (
        False,
        0.0,
        0.0,
        False,
        0,
    )
    assert (
        refused.text == "That is no action on this page, and nothing happened. "
        f"The actions are: search[keywords].\n{first}"
    )
    opened = steps(game, "search[jumpsuit]", "click[b000000001]")[-1].text
    for action in (
        "click[b000000002]",
        "click[next >]",
        "click[yellow]",
        "search[]",
        "buy now",
        "click[buy now] now",
        "Small",
    ):
        refused = game.step(action)
        assert not refused.valid
        assert refused.text.endswith(f"click[reviews], click[buy now].\n{opened}")
    assert game.moves == 2
    assert WebShopGame("compact").reset(original).startswith("want")


def test_actions_are_read_from_answers(original: Task) -> None:
    game = WebShopGame("full")
    game.reset(original)
    answers = (
        "I could search[tea] first.\n<answer>search[ Women's   JUMPSUIT ]</answer>",
        "<answer>Click [ b000000001 ]</answer>",
        "<answer>click[navy blue]</answer> or <answer>click[pink]</answer>", "CLICK[Small].",
        "It fits, so:\nclick[BUY NOW]",
    )  # fmt: skip
    assert [result.valid for result in steps(game, *answers)] == [True] * 5
    assert not game._session or game._session.keywords == "women's jumpsuit"


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_random_and_malformed_actions_never_crash_the_game(rendering: Rendering) -> None:
    check_junk(rendering, 1000)


@pytest.mark.soak
@pytest.mark.parametrize("rendering", RENDERINGS)
def test_ten_thousand_random_and_malformed_actions_never_crash_the_game(
    rendering: Rendering,
) -> None:
    check_junk(rendering, 10_000)


def check_junk(rendering: Rendering, actions: int) -> None:
    rng, game, tasks = random.Random(4), WebShopGame(rendering), iter(UNSEEN * 100)
    junk = [
        "", " ", "search[", "search[]", "search[[]]", "search[the]", "click[]", "click", "[x]",
        "buy[now]", "\x00", "search[\x00]", "é" * 500, "<answer>click[buy now]",
        "<answer></answer>\n", "search[" + "a " * 2000 + "]", "click[search]", "9" * 100,
    ]  # fmt: skip
    task = next(tasks)
    page, done, moves = game.reset(task), False, 0
    for _ in range(actions):
        if done:
            task = next(tasks)
            page, moves = game.reset(task), 0
        result = game.step(rng.choice(junk) if rng.random() < 0.3 else any_action(rng, page, task))
        moves += result.valid
        assert game.moves == moves
        assert result.text
        assert result.valid or result.text.endswith(page), "the page has not changed"
        assert result.reward == float(result.success) == float(result.score == 1.0)
        page, done = result.text if result.valid else page, result.done


# ── winning ───────────────────────────────────────────────────────────────────────────────────────


def wins(rendering: Rendering, tasks: tuple[Task, ...]) -> float:
    game, (_, turns) = WebShopGame(rendering), shipped_task("webshop", rendering)
    return sum(
        play_episode(game, task, scripted_player(SPEC, random.Random(0)), turns).success
        for task in tasks
    ) / len(tasks)


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_the_scripted_player_wins_through_text_alone(rendering: Rendering) -> None:
    assert wins(rendering, UNSEEN[:60]) >= 0.95


@pytest.mark.soak
@pytest.mark.parametrize("rendering", RENDERINGS)
def test_the_scripted_player_wins_every_eval_set(rendering: Rendering) -> None:
    assert wins(rendering, eval_tasks("unseen", 256, 0, PAPER)) >= 0.95
    assert wins(rendering, eval_tasks("seen", 256, 0, PERSISTENT)) >= 0.95


def test_the_scripted_player_rejects_goals_that_it_cannot_read() -> None:
    with pytest.raises(
        ConfigError, match=r"task = 'i want a jumpsuit.': was written by a person.*Play it yourself"
    ):
        play_episode(
            WebShopGame("full"),
            replace(UNSEEN[0], goal="i want a jumpsuit."),
            scripted_player(SPEC, random.Random(0)),
            1,
        )


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_random_play_does_not_win(rendering: Rendering) -> None:
    game, won, (_, turns) = WebShopGame(rendering), 0, shipped_task("webshop", rendering)
    for task in UNSEEN[:60]:
        game.reset(task)
        rng = random.Random(task.seed)
        for _ in range(turns):
            assert game._session is not None
            clicks = [f"click[{target}]" for target in game._session.clickable]
            result = game.step(
                rng.choice([*clicks, f"search[{' '.join(rng.sample(task.goal.split(), 2))}]"])
            )
            won += result.success
            if result.done:
                break
    assert won <= 6


# ── the stream and the evals ──────────────────────────────────────────────────────────────────────


def test_the_papers_stream_draws_a_goal_for_every_group() -> None:
    tasks = WebShopStream(0, PAPER).draw(640)
    assert len({task.params["lgen"] for task in tasks}) == 640
    assert len({task.goal for task in tasks}) > 200


def test_needs_persist_while_wanted_options_vary() -> None:
    tasks = WebShopStream(0, PERSISTENT).draw(32 * 10)
    by_place: dict[int, list[Task]] = {}
    for task in tasks:
        by_place.setdefault(int(task.params["lgen"]), []).append(task)
    game = WebShopGame("compact")
    varied = 0
    for visits in by_place.values():
        assert len({task.goal for task in visits}) == 1
        varied += len({game.reset(task) for task in visits}) > 1
    assert {len(visits) for visits in by_place.values()} == {1, 2, 3, 4, 5, 10}
    assert varied > 30
    assert SPEC.tasks.revisit is not None
    again = SPEC.tasks.revisit(UNSEEN[0], 1)
    assert (again.goal, again.params["lgen"]) == (UNSEEN[0].goal, UNSEEN[0].params["lgen"])
    assert again.params["core"] != UNSEEN[0].params["core"]


def test_evals_are_fixed_and_separate_from_training() -> None:
    assert eval_tasks("unseen", 64, 5, PERSISTENT) == UNSEEN[:64]
    assert len({task.goal for task in UNSEEN}) == 150
    seen = eval_tasks("seen", 32, 3, PERSISTENT)
    assert seen == eval_tasks("seen", 64, 3, PERSISTENT)[:32]
    assert seen != eval_tasks("seen", 32, 4, PERSISTENT)
    train = WebShopStream(3, PERSISTENT).draw(640)
    assert {task.goal for task in seen} <= {task.goal for task in train}
    uses = [{task.goal for task in tasks} for tasks in (train, UNSEEN, probe_tasks(75))]
    assert sum(map(len, uses)) == len(set().union(*uses))
    with pytest.raises(ValueError, match="seen or unseen"):
        eval_tasks("train", 1, 0, PAPER)
    with pytest.raises(ValueError, match="permanent"):
        eval_tasks("seen", 1, 0, PAPER)


def test_the_streams_state_restores_the_exact_continuation() -> None:
    through = WebShopStream(5, PERSISTENT)
    through.draw(77)
    resumed = WebShopStream(5, PERSISTENT)
    resumed.load_state(json.loads(json.dumps(through.state())))
    assert resumed.draw(100) == through.draw(100)


async def test_the_host_runs_the_game() -> None:
    host = ThreadHost({"webshop": (SPEC, "compact")}, threads=2)
    environment = await host.acquire(UNSEEN[0])
    assert (await environment.reset(UNSEEN[0])).text.startswith("want ")
    assert (await environment.step("search[desk]")).score == 0.0
    await host.release(environment)
    await host.aclose()
    assert host.failures == 0
