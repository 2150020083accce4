"""Bundled models and the recipe that trains them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crl.config.models import bundled_models, model_profile, resolve_model
from crl.engines.torch import TorchEngine
from crl.envs import alfworld, scienceworld, webshop
from crl.envs.actions import COMPASS
from crl.envs.alfworld import SMALL_SPEC
from crl.envs.alfworld import lessons as house_lessons
from crl.envs.base import EnvSpec, Runtime
from crl.envs.hosting.threads import ThreadHost
from crl.envs.room import SPEC, demonstration_tasks, probe_tasks
from crl.envs.room.lessons import (
    LESSONS,
    RoomAdvisor,
    digest,
    lesson,
    read,
    stairs_direction,
    true_stairs_direction,
)
from crl.envs.webshop import lessons as webshop_lessons
from crl.evaluation.probe import FixedRetriever
from crl.manager.distillation.ops import parse_ops
from crl.methods.parts.distilling import Digest
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import demonstrated_traces
from crl.modeling.loading import load_model, load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Hit
from crl.rollout.episode import EpisodeKey, EpisodeRunner, Limits
from crl.rollout.waves import LockstepSampler
from crl.run.halves.make_models import recipe_record
from crl.tiny import recipe
from crl.tiny.drills import drill, webshop_visits
from crl.tiny.drills.alfworld import chores
from crl.tiny.drills.alfworld.houses import SmallHouse
from crl.tiny.drills.drill import Drill, Episode
from crl.tiny.drills.room import RoomLessons, answer, distil_prompt
from crl.tiny.drills.room_personas import (
    Explorer,
    Follower,
    Lingerer,
    Pacer,
    Persona,
    Walker,
    first_step,
    persona_for_lesson,
)
from crl.tiny.drills.room_walks import ACTOR_WALKS, EXTRACTOR_WALKS, RoomWalks
from crl.tiny.new_models import Shape, new_model, train_tokenizer
from crl.types import ExperienceUse, RolloutPlan, Sampling, Segment, Task
from support.doors import runner
from support.simulator import simulated


def renderer(path: Path) -> ChatRenderer:
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


def actions(segments: Sequence[Segment]) -> list[str]:
    return [segment.text for segment in segments if segment.origin == "policy"]


def hinted(text: str) -> Hit:
    return Hit(text, ExperienceUse("told", 1, "told", "start"))


def episode(*texts: str, hint: str = "") -> Episode:
    """Return an episode with the given texts of the room and the actor in turn, the room first."""
    (task,) = demonstration_tasks(1)
    hints = [Segment("user", hint, "experience")] if hint else []
    turns = [
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    ]
    success = texts[-1] == "stairs reached."
    return Episode(
        task,
        hinted(hint) if hint else None,
        (Segment("user", task.goal, "task"), *hints, *turns),
        success,
    )


# ── the shipped models ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_a_shipped_model_has_the_settings_of_its_recipe(name: str) -> None:
    """Compare the shape, drills and training settings stored with the weights with the code.

    After a change of one of them the model must be trained again.
    """
    path, expected = resolve_model(name), recipe.RECIPES[name]
    stored = json.loads((path / "recipe.json").read_text("utf-8"))
    assert model_profile(path) == "compact"
    command = "crl make-models --seed 0"
    measured = {"loss": stored["loss"], "versions": stored["versions"]}
    assert stored == recipe_record(expected, command, 0.0) | measured


def test_the_shipped_models_are_small() -> None:
    assert bundled_models() == sorted(recipe.RECIPES)
    assert (
        sum(
            file.stat().st_size
            for name in bundled_models()
            for file in resolve_model(name).iterdir()
        )
        < 3_000_000
    )


async def success(
    episode_runner: EpisodeRunner, tasks: Sequence[Task], advice: Callable[[Task], str | None]
) -> float:
    """Return the share of the tasks that the actor solves with `advice` in its prompt."""
    keys = [EpisodeKey("probe", 0, i, 0) for i in range(len(tasks))]
    for key in keys:
        episode_runner.decoding.sampler.join(key.session)
    texts = {task.goal: text for task in tasks if (text := advice(task))}
    advised_runner = replace(episode_runner, retriever=FixedRetriever(texts))
    plans = [RolloutPlan("guided" if task.goal in texts else "free") for task in tasks]
    trajectories = await asyncio.gather(
        *(advised_runner.play(*each) for each in zip(keys, tasks, plans, strict=True))
    )
    assert not any(trajectory.error for trajectory in trajectories)
    return sum(trajectory.success for trajectory in trajectories) / len(trajectories)


HOUSE = replace(SMALL_SPEC, runtime=Runtime(), make_game=lambda rendering: SmallHouse())


@pytest.mark.parametrize(
    ("spec", "tasks", "limits", "free_bounds"),
    [
        (SPEC, probe_tasks(128), Limits(4, 4), (0.2, 0.5)),
        (webshop.SPEC, webshop.probe_tasks(64), Limits(webshop_visits.TURNS, 24), (0.0, 0.25)),
        (HOUSE, alfworld.probe_tasks(96), Limits(chores.TURNS, 16), (0.02, 0.3)),
    ],
    ids=["room", "webshop", "alfworld"],
)
async def test_the_shipped_actor_follows_right_advice(
    tiny_actor: Path,
    spec: EnvSpec,
    tasks: Sequence[Task],
    limits: Limits,
    free_bounds: tuple[float, float],
) -> None:
    """Play places that were not used in training. Without advice the actor solves at most half."""
    advisor = spec.curriculum.advisor
    assert advisor is not None
    engine = TorchEngine(
        load_model(tiny_actor, torch.device("cpu")), max_batch=128, max_context=1024
    )
    host = ThreadHost({spec.name: (spec, "compact")}, threads=2)
    episode_runner = runner(
        engine,
        host,
        sampler=LockstepSampler(engine),
        context=ChatContext({spec.name: ""}),
        limits={spec.name: limits},
    )
    try:
        free, right = (
            await success(episode_runner, tasks, lambda task: None),
            await success(episode_runner, tasks, advisor.right),
        )
        wrong = await success(
            episode_runner, tasks, lambda task: advisor.wrong(task, random.Random(task.seed))
        )
    finally:
        await engine.aclose()
        await host.aclose()
    lowest, highest = free_bounds
    assert lowest <= free <= highest
    assert right - free >= 0.2
    assert right - wrong >= 0.2


Claim = tuple[str, bool | None]
"""Kind of a lesson, and whether its claim about the direction or the purchase is true.

The second value is None if the lesson makes no such claim.
"""


def room_claim(text: str, episode: Episode) -> Claim:
    kind, direction = read(text)
    return kind, direction == stairs_direction(episode.segments) if kind == "exit" else None


def shop_claim(text: str, episode: Episode) -> Claim:
    kind, brand = webshop_lessons.read(text)
    return kind, brand == webshop_lessons.right_brand(episode.segments) if kind == "buy" else None


def house_claim(text: str, episode: Episode) -> Claim:
    chore = house_lessons.chore_of(episode.segments)
    kind, place = house_lessons.read(text, chore)
    return kind, place == house_lessons.first_sightings(episode.segments).get(
        chore.thing
    ) if kind == "where" else None


@pytest.mark.parametrize(
    ("digest", "episodes", "claim", "kinds_taught"),
    [
        (digest, EXTRACTOR_WALKS.episodes(random.Random(5), probe_tasks(400)), room_claim, LESSONS),
        (
            webshop_lessons.digest,
            webshop_visits.EXTRACTOR_VISITS.episodes(random.Random(5), 400),
            shop_claim, webshop_lessons.LESSONS,
        ),
        (
            house_lessons.digest,
            chores.EXTRACTOR_CHORES.episodes(random.Random(5), alfworld.probe_tasks(400)),
            house_claim, house_lessons.LESSONS,
        ),
    ],
    ids=["room", "webshop", "alfworld"],
)  # fmt: skip
async def test_the_shipped_extractor_writes_true_lessons(
    tiny_extractor: Path,
    digest: Digest,
    episodes: Iterator[Episode],
    claim: Callable[[str, Episode], Claim],
    kinds_taught: Iterable[str],
) -> None:
    """Play places that were not used in training.

    At least 95 % of the answers are well-formed, and at least 85 % of their claims agree with the
    episode.
    """
    chat, finished_episodes = renderer(tiny_extractor), list(episodes)
    engine = TorchEngine(
        load_model(tiny_extractor, torch.device("cpu")), max_batch=128, max_context=512
    )

    async def answer_to(number: int) -> str:
        prompt = chat.encode(
            chat.text(drill.distil_prompt(digest, finished_episodes[number], number))
        )
        completion = await engine.generate(prompt, Sampling(32, chat.stop_ids), rng=number)
        return (
            chat.decode(completion.ids).removesuffix("<|im_end|>")
            if completion.finish == "stop"
            else ""
        )

    try:
        answers = await asyncio.gather(*map(answer_to, range(len(finished_episodes))))
    finally:
        await engine.aclose()
    kinds, claims = Counter[str](), list[bool]()
    for answer_text, episode in zip(answers, finished_episodes, strict=True):
        parsed = parse_ops(answer_text, 1 if episode.hint else 0)
        kind, true = (
            claim(parsed.ops[0].text, episode)
            if parsed.ops and parsed.ops[0].kind != "return"
            else ("return", None)
        )
        kinds["malformed" if len(parsed.ops) != 1 or parsed.dropped else kind] += 1
        if true is not None:
            claims.append(true)
    assert kinds["malformed"] + kinds["other"] <= 0.05 * len(finished_episodes)
    assert set(kinds_taught) <= set(kinds)
    assert len(claims) >= 20
    assert sum(claims) >= 0.85 * len(claims)


def test_the_extractors_answers_are_short(tiny_extractor: Path) -> None:
    """Check that every answer in the training data has at most 32 tokens with the stop token."""
    chat = renderer(tiny_extractor)
    for direction in COMPASS:
        example = episode(
            "at 3 3\ndark north",
            direction,
            f"at 3 3\nstairs {direction}",
            hint="from the start go up.",
        )
        assert max(len(chat.encode(answer(kind, example))) for kind in LESSONS) + 1 <= 32


# ── from demonstrations to models ─────────────────────────────────────────────────────────────────


def test_a_demonstration_becomes_the_tokens_of_a_rollout(tiny_actor: Path) -> None:
    """Expect the template's text. The mask covers each action and its stop token."""
    chat = renderer(tiny_actor)
    segments = [
        Segment("user", "Room: the jade attic.", "task"),
        Segment("user", "at 1 1", "env"), Segment("assistant", "south", "policy"),
        Segment("user", "at 2 1", "env"), Segment("assistant", "east", "policy"),
    ]  # fmt: skip
    (trace,) = demonstrated_traces(segments, chat)
    assert chat.decode(trace.ids) == (
        "<|im_start|>user\nRoom: the jade attic.\nat 1 1<|im_end|>\n"
        "<|im_start|>assistant\nsouth<|im_end|>\n"
        "<|im_start|>user\nat 2 1<|im_end|>\n<|im_start|>assistant\neast<|im_end|>"
    )
    trained = [i for i, m in zip(trace.ids, trace.mask, strict=True) if m]
    assert chat.decode(trained) == "south<|im_end|>east<|im_end|>"


def test_a_loaded_tokenizer_equals_the_trained_one(tmp_path: Path) -> None:
    """Check the tokenizer class, which transformers chooses by the model's type.

    A saved tokenizer of another class would split texts differently after loading.
    """
    demonstrations = list(ACTOR_WALKS.make(random.Random(0), 50))
    trained = train_tokenizer(demonstrations, vocabulary=400)
    new_model(Shape(vocabulary=400), trained, seed=0).save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    texts = [s.text for d in demonstrations for s in d] + [
        "<|im_start|>user\nat 2 3\n<|im_end|>",
        "naïve 12345  \n\t x",
    ]
    assert [loaded.encode(text) for text in texts] == [trained.encode(text) for text in texts]
    assert (
        len(loaded) == len(trained) == load_model(tmp_path, torch.device("cpu")).config.vocab_size
    )
    assert loaded.decode(loaded.encode(texts[-2])) == texts[-2]


def test_every_action_is_short_enough_for_a_turn(tiny_actor: Path) -> None:
    """Check the limit of tasks/room.toml for compact models: 4 tokens with the stop token."""
    chat = renderer(tiny_actor)
    assert max(len(chat.encode(action)) for action in COMPASS) + 1 <= 4


def plays_simulator(drill: Drill) -> bool:
    return drill.env == scienceworld.SMALL and drill.part in ("episode", "ask")


@pytest.mark.parametrize(
    "drill",
    [
        pytest.param(drill, marks=[simulated] * plays_simulator(drill), id=drill.name)
        for recipe in recipe.RECIPES.values()
        for drill in recipe.drills
    ],
)
def test_drills_are_reproducible(drill: Drill) -> None:
    episodes = 5 if plays_simulator(drill) else 20
    first, again, other = (list(drill.make(random.Random(seed), episodes)) for seed in (3, 3, 4))
    assert first == again != other


# ── personas ──────────────────────────────────────────────────────────────────────────────────────


def test_success_rates_of_personas() -> None:
    """Check the order of success: explorer (by far the highest), walker, pacer.

    The explorer goes straight to visible stairs.
    """

    def wins(persona: Callable[[], Persona]) -> int:
        walks = RoomWalks(((persona, 1.0),), slip=0.0)
        return sum(
            walk.success for walk in walks.episodes(random.Random(0), demonstration_tasks(60))
        )

    explored, walked, paced = wins(Explorer), wins(Walker), wins(Pacer)
    assert explored >= 27  # a scripted explorer wins 57 % in 4 turns
    assert explored >= walked + 15
    assert walked > paced


class OpenRoom:
    """Room of 5 × 5 cells without inner walls. All cells are visible, and no step fails.

    There are no stairs unless `stairs` names their cell.
    """

    def __init__(self, start: tuple[int, int], stairs: tuple[int, int] | None = None) -> None:
        self.start = self.position = start
        rows = [["."] * 5 for _ in range(5)]
        if stairs:
            rows[stairs[1]][stairs[0]] = ">"
        self.grid = tuple("".join(row) for row in rows)

    def walk(self, persona: Persona, turns: int) -> list[str]:
        moves = []
        for _ in range(turns):
            moves.append(
                persona.act(self, random.Random(len(moves)))  # pyright: ignore[reportArgumentType]
            )
            dx, dy = COMPASS[moves[-1]]
            self.position = (
                min(max(self.position[0] + dx, 0), 4),
                min(max(self.position[1] + dy, 0), 4),
            )
        return moves


def test_a_follower_walks_as_advised_and_to_visible_stairs() -> None:
    moves = OpenRoom((0, 1)).walk(Follower("east"), 6)
    assert moves[:4] == ["east"] * 4
    assert COMPASS[moves[4]] == tuple(-step for step in COMPASS[moves[5]]), "at the wall it paces"
    assert OpenRoom((0, 4), stairs=(2, 2)).walk(Follower("east"), 2) == ["northeast", "northeast"]


def test_a_walker_walks_in_its_direction_to_the_wall() -> None:
    moves = OpenRoom((4, 4)).walk(Walker("northwest"), 5)
    assert moves[:4] == ["northwest"] * 4 != moves[1:]


def test_a_lingerer_stays_near_its_start() -> None:
    room = OpenRoom((1, 3))
    for _ in range(20):
        room.walk(Lingerer(), 1)
        assert max(abs(room.position[0] - 1), abs(room.position[1] - 3)) <= 1


def test_the_persona_for_each_kind_of_lesson() -> None:
    personas = {kind: type(persona_for_lesson(kind, "north")) for kind in LESSONS}
    none = type(None)
    assert personas == {
        "exit": Follower, "walk": Walker, "explore": Explorer, "stay": Lingerer, "back": Pacer,
        "lead": none, "careful": none, "time": none,
    }  # fmt: skip


def test_first_step_goes_around_a_trap() -> None:
    class Corridor:
        position = (0, 0)
        grid = ("@^>..", "..~~~", "~~~~~", "~~~~~", "~~~~~")

    step = first_step(Corridor(), {(2, 0)}, random.Random(0))  # pyright: ignore[reportArgumentType]
    assert step in ("southeast", "south")  # not east, where the trap is


# ── the actor's drills ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def walks() -> list[Episode]:
    return list(ACTOR_WALKS.episodes(random.Random(1), demonstration_tasks(800)))


def test_shares_of_advice_in_walks(walks: list[Episode]) -> None:
    """Check that 12 of 49 direction hints are random. One in eight of these is right."""
    counts = Counter[str]()
    for walk in walks:
        kind, direction = read(walk.hint.text) if walk.hint else ("none", None)
        right = direction == true_stairs_direction(int(walk.task.params["lgen"]))
        counts[f"{'right' if right else 'wrong'} exit" if kind == "exit" else kind] += 1
    shares = {kind: count / len(walks) for kind, count in counts.items()}
    expected = {"none": 0.25, "right exit": 0.37 + 0.12 / 8, "wrong exit": 0.12 * 7 / 8}
    expected |= {kind: 0.26 / 7 for kind in LESSONS if kind != "exit"}
    assert shares == pytest.approx(expected, abs=0.05)
    assert set(shares) == set(expected)


def test_walks_are_the_actors_conversations(walks: list[Episode]) -> None:
    """Check that a walk opens with the goal, the hint and the first observation, like an episode.

    Valid actions and their results follow.
    """
    for walk in walks:
        opening = [segment.origin for segment in walk.segments[: 3 if walk.hint else 2]]
        assert opening == ["task", *(["experience"] if walk.hint else []), "env"]
        assert walk.hint is None or walk.segments[1].text == walk.hint.text
        turns = walk.segments[len(opening) :]
        assert [segment.origin for segment in turns] == ["policy", "env"] * (len(turns) // 2)
        assert set(actions(turns)) <= set(COMPASS)
        assert 1 <= len(turns) // 2 <= 8
        assert walk.success == (turns[-1].text == "stairs reached." and len(turns) <= 8)


def test_advised_directions_are_followed(walks: list[Episode]) -> None:
    """Check that the first step follows the hint, except for visible stairs, walls and slips.

    Right hints raise the success rate.
    """
    free = [walk for walk in walks if walk.hint is None]
    right = [
        walk for walk in walks if walk.hint and walk.hint.text == RoomAdvisor().right(walk.task)
    ]
    unseen = [walk for walk in right if "stairs" not in walk.segments[2].text]
    followed = [
        lesson("exit", actions(walk.segments)[0]) == walk.segments[1].text for walk in unseen
    ]
    assert sum(followed) >= 0.93 * len(followed)
    assert (
        sum(walk.success for walk in right) / len(right)
        >= sum(walk.success for walk in free) / len(free) + 0.4
    )


# ── the extractor's drills ────────────────────────────────────────────────────────────────────────

# As (x, y) from 0, the start is (2, 2) and the stairs are at (1, 1).
SEEN = (
    "at 3 3\ndark north",
    "north",
    "at 2 3\nstairs west\njackal east",
    "east",
    "at 2 3\nstairs west",
)
UNSEEN = ("at 3 3\ndark north", "north", "at 2 3\ndark west", "southeast", "at 3 4\ndark west")


@pytest.mark.parametrize(
    ("kind", "hint", "texts", "expected"),
    [
        ("exit", "", SEEN, '[{"op":"add","text":"from the start go northwest."}]'),
        ("exit", "be careful.", SEEN, '[{"op":"add","text":"from the start go northwest."}]'),
        (
            "exit",
            "walk north until the wall.",
            SEEN,
            '[{"op":"add","text":"from the start go northwest."}]',
        ),
        (
            "exit",
            "from the start go northwest.",
            SEEN,
            '[{"op":"add","text":"from the start go northwest."}]',
        ),
        (
            "exit",
            "from the start go north.",
            SEEN,
            '[{"op":"update","target":1,"text":"from the start go northwest."}]',
        ),
        ("exit", "", UNSEEN, '[{"op":"return"}]'),
        ("exit", "from the start go north.", UNSEEN, '[{"op":"return"}]'),
        ("walk", "", SEEN, '[{"op":"add","text":"walk east until the wall."}]'),
        (
            "walk",
            "from the start go north.",
            UNSEEN,
            '[{"op":"add","text":"walk southeast until the wall."}]',
        ),
        ("careful", "from the start go north.", SEEN, '[{"op":"add","text":"be careful."}]'),
        ("explore", "", UNSEEN, '[{"op":"add","text":"look at dark cells first."}]'),
    ],
)
def test_the_lesson_of_an_episode(
    kind: str, hint: str, texts: tuple[str, ...], expected: str
) -> None:
    assert answer(kind, episode(*texts, hint=hint)) == expected
    parsed = parse_ops(expected, num_shown=1 if hint else 0)
    assert (len(parsed.ops), parsed.dropped, parsed.malformed) == (1, {}, False)


def test_the_distillation_prompt() -> None:
    example = episode(*SEEN, hint="be careful.")
    (prompt,) = distil_prompt(example)
    assert prompt.text.splitlines() == [
        example.task.goal, "hint 1 be careful.", "moves north east",
        "stairs northwest of the start", "failure",
    ]  # fmt: skip


def test_kinds_of_lessons_are_equally_frequent() -> None:
    demonstrations = list(RoomLessons(EXTRACTOR_WALKS).make(random.Random(2), 800))
    kinds, hints = Counter[str](), 0
    for prompt, answer_segment in demonstrations:
        hints += "\nhint 1 " in prompt.text
        (op,) = parse_ops(answer_segment.text, num_shown=1 if "\nhint 1 " in prompt.text else 0).ops
        kinds["exit" if op.kind == "return" else read(op.text)[0]] += 1
        assert (op.kind == "return") <= ("stairs not seen" in prompt.text)
        if read(op.text)[0] == "exit":
            assert f"\nstairs {read(op.text)[1]} of the start\n" in prompt.text
    assert {kind: count / 800 for kind, count in kinds.items()} == pytest.approx(
        dict.fromkeys(LESSONS, 1 / 8), abs=0.04
    )
    assert hints / 800 == pytest.approx(0.5, abs=0.06)
