"""Skills of the bundled models before RL, on places and chunks that were not in their training.

    python benchmarks/warm_start.py --models DIRECTORY --out FILE

DIRECTORY is the output of `crl make-models`; without --models, the shipped models are measured.
FILE gets the metrics as JSON. ScienceWorld needs the extra scienceworld. Its lessons, verdicts and
merges, and the verdicts and merges of search_qa, have new random draws, but the places are those of
the training. Answers are sampled at temperature 1. Every metric is a share with its 95 % Wilson
interval. An answer is right if it equals the demonstrator's answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from crl.config.models import resolve_model
from crl.config.schema import SearchSection
from crl.engines.torch import TorchEngine
from crl.envs import alfworld, room, scienceworld, search_qa, webshop
from crl.envs.alfworld import lessons as house_lessons
from crl.envs.base import EnvSpec, Runtime
from crl.envs.hosting.threads import ThreadHost
from crl.envs.room.lessons import (
    RoomAdvisor,
    from_here,
    read,
    stairs_direction,
    true_stairs_direction,
    visited_cells,
)
from crl.envs.scienceworld import lessons as experiment_lessons
from crl.envs.search_qa import lessons as search_lessons
from crl.envs.webshop.lessons import digest as webshop_digest
from crl.envs.webshop.lessons import read as read_shop
from crl.envs.webshop.lessons import right_brand, wrong_brands
from crl.errors import RolloutError
from crl.evaluation.evaluate import SuccessRate
from crl.manager.distillation.ops import parse_ops
from crl.methods.parts.asking import COMPACT_CALL
from crl.methods.parts.distilling import Digest
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.modeling.loading import load_model, load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Hit
from crl.rollout.critic import parse_critique
from crl.tiny.drills import (
    drill,
    grids,
    require_simulators,
    search_qa_episodes,
    webshop_visits,
)
from crl.tiny.drills import scienceworld as experiment_drills
from crl.tiny.drills import search_qa as search_drills
from crl.tiny.drills import webshop as webshop_drills
from crl.tiny.drills.alfworld import chores
from crl.tiny.drills.alfworld.houses import SmallHouse
from crl.tiny.drills.drill import OFFER, Episode
from crl.tiny.drills.room import (
    bank_lesson,
    cut_at_question,
    distil_prompt,
    merges,
    refine_prompt,
    refinement,
    verdicts,
)
from crl.tiny.drills.room_walks import EXTRACTOR_WALKS, SCORED_TURNS
from crl.tiny.drills.scienceworld_experiments import EXTRACTOR_EXPERIMENTS
from crl.types import ExperienceUse, Sampling, Segment, Task

SAMPLES_PER_PLACE = 2
"""Number of verdicts and of merges of each kind, per place."""

VERDICT_TOKENS, ANSWER_TOKENS = 24, 40
"""Maximal tokens of a verdict and of an extractor's answer, as in tasks/presets/cpu.toml."""

Metrics = dict[str, list[bool]]
"""Outcomes by metric."""


@dataclass(frozen=True)
class TaskLimits:
    """Task with the limits of a run of tiny models, as in tasks/TASK.toml."""

    spec: EnvSpec
    turns: int
    """Turns of an episode."""
    tokens: int
    """Maximal tokens of an answer."""


ROOM, SHOP = (
    TaskLimits(room.SPEC, SCORED_TURNS, 4),
    TaskLimits(webshop.SPEC, webshop_visits.TURNS, 24),
)
HOUSE = TaskLimits(
    replace(alfworld.SMALL_SPEC, runtime=Runtime(), make_game=lambda rendering: SmallHouse()),
    chores.TURNS,
    16,
)
SEARCH = TaskLimits(
    search_qa.configured_small(
        SearchSection(top_k=search_qa_episodes.TOP_K), search_qa.no_embedder
    ),
    search_qa_episodes.TURNS,
    16,
)

EXPERIMENT = TaskLimits(
    replace(scienceworld.SMALL_SPEC, runtime=Runtime()), scienceworld.SMALL_SPEC.turns, 24
)
EXPERIMENTS = 66
"""Games of ScienceWorld's advice probe: all variations that no demonstration and no run uses."""

OTHER_WORLDS = range(101, 105)
"""Seeds of worlds in which no demonstration of search_qa was played."""


@dataclass(frozen=True)
class ChatModel:
    """Model that answers conversations."""

    engine: TorchEngine
    chat: ChatRenderer

    @classmethod
    def load(cls, path: Path) -> ChatModel:
        """Return the model in a directory, on the CPU."""
        tokenizer = load_tokenizer(path)
        model = load_model(path, torch.device("cpu"))
        return cls(
            TorchEngine(model, max_batch=128, max_context=1024, threads=1),
            ChatRenderer(tokenizer, stop_ids(path, tokenizer)),
        )

    async def answer(self, prompt: Sequence[Segment], tokens: int, seed: int) -> str | None:
        """Return the answer to a prompt, or None if it exceeds `tokens`."""
        ids = self.chat.encode(self.chat.text(prompt))
        completion = await self.engine.generate(ids, Sampling(tokens, self.chat.stop_ids), rng=seed)
        return self.chat.decode(completion.ids[:-1]) if completion.finish == "stop" else None


# ── the actor ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EpisodeOutcome:
    """Outcome of an episode."""

    first_observation: str
    """First observation."""
    answers: tuple[str | None, ...]
    """Actor's answers; None for an answer that exceeded the token limit."""
    success: bool

    @property
    def asked(self) -> bool:
        """True if the actor asked a question."""
        return COMPACT_CALL in self.answers


async def play(
    actor: ChatModel, host: ThreadHost, limits: TaskLimits, number: int, task: Task, *,
    hint: str | None = None, offer: bool = False, reply: str | None = None,
) -> EpisodeOutcome:  # fmt: skip
    """Play one scored episode.

    `reply`: reply to a question that the actor is made to ask at the start. If the actor asks a
    question itself, the episode ends.
    """
    env = await host.acquire(task)
    context = ChatContext({task.name: ""})
    try:
        hits = [Hit(hint, ExperienceUse("told", 1, "told", "start"))] if hint else []
        *head, first = context.opening(task, await env.reset(task), hits)
        segments, answers = [*head, *([OFFER] if offer else []), first], list[str | None]()
        if reply:
            segments += [
                Segment("assistant", COMPACT_CALL, "tool_call"),
                Segment("user", reply, "tool_result"),
            ]
        for turn in range(limits.turns):
            try:
                answers.append(await actor.answer(segments, limits.tokens, 100 * number + turn))
            except RolloutError:  # the context is full; the episode is lost, as in a run
                break
            if answers[-1] == COMPACT_CALL:
                break
            result = await env.step(answers[-1] or "")
            if result.done:
                return EpisodeOutcome(first.text, tuple(answers), result.success)
            segments += [
                Segment("assistant", answers[-1] or "", "policy"),
                *context.feedback(result),
            ]
        return EpisodeOutcome(first.text, tuple(answers), success=False)
    finally:
        await host.release(env)


async def advice_metrics(
    actor: ChatModel, limits: TaskLimits, name: str, tasks: Sequence[Task]
) -> Metrics:
    """Return success and truncation of answers, by the advice that the actor receives.

    Without an advisor, only episodes without advice are played.
    """
    advisor, rng, metrics = limits.spec.curriculum.advisor, random.Random(0), Metrics()
    hints_by_advice: dict[str, list[str | None]] = {"no": [None] * len(tasks)}
    if advisor:
        hints_by_advice |= {
            "right": [*map(advisor.right, tasks)],
            "wrong": [advisor.wrong(task, rng) for task in tasks],
        }
    host = ThreadHost({limits.spec.name: (limits.spec, "compact")}, threads=2)
    try:
        for advice, hints in hints_by_advice.items():
            episodes = (
                play(actor, host, limits, i, task, hint=hint)
                for i, (task, hint) in enumerate(zip(tasks, hints, strict=True))
            )
            outcomes = await asyncio.gather(*episodes)
            metrics[f"{name}: success, {advice} advice"] = [p.success for p in outcomes]
            metrics[f"{name}: answers truncated, {advice} advice"] = [
                None in p.answers for p in outcomes
            ]
    finally:
        await host.aclose()
    return metrics


async def shop_metrics(path: Path, n: int) -> Metrics:
    actor = ChatModel.load(path)
    try:
        metrics = await advice_metrics(actor, SHOP, "shop", webshop.probe_tasks(n))
        verdicts = await verdict_metrics(actor, webshop_drills.verdicts, SAMPLES_PER_PLACE * n)
    finally:
        await actor.engine.aclose()
    return metrics | {f"shop: {name}": outcomes for name, outcomes in verdicts.items()}


async def house_metrics(path: Path, n: int) -> Metrics:
    actor = ChatModel.load(path)
    try:
        return await advice_metrics(actor, HOUSE, "house", alfworld.probe_tasks(n))
    finally:
        await actor.engine.aclose()


async def search_metrics(path: Path, n: int) -> Metrics:
    actor, tasks = ChatModel.load(path), SEARCH.spec.curriculum.probe_tasks
    assert tasks is not None
    try:
        metrics = await advice_metrics(actor, SEARCH, "search", tasks(n))
        verdicts = await verdict_metrics(actor, search_drills.verdicts, SAMPLES_PER_PLACE * n)
    finally:
        await actor.engine.aclose()
    return metrics | {f"search: {name}": outcomes for name, outcomes in verdicts.items()}


async def experiment_metrics(path: Path, n: int) -> Metrics:
    actor, tasks = ChatModel.load(path), scienceworld.probe_tasks(min(n, EXPERIMENTS))
    try:
        metrics = await advice_metrics(actor, EXPERIMENT, "experiment", tasks)
        verdicts = await verdict_metrics(actor, experiment_drills.verdicts, SAMPLES_PER_PLACE * n)
    finally:
        await actor.engine.aclose()
    return metrics | {f"experiment: {name}": outcomes for name, outcomes in verdicts.items()}


async def grid_metrics(path: Path, n: int) -> Metrics:
    actor, metrics = ChatModel.load(path), Metrics()
    try:
        for grid in (grids.MAZE, grids.KEYROOM, grids.RIVER, grids.SOKOBAN):
            limits = TaskLimits(grid.spec, grid.scored_turns, 8)
            metrics |= await advice_metrics(
                actor, limits, grid.spec.name, grid.places.probe_tasks(n)
            )
    finally:
        await actor.engine.aclose()
    return metrics


async def actor_metrics(path: Path, n: int) -> Metrics:
    actor, host = ChatModel.load(path), ThreadHost({room.NAME: (room.SPEC, "compact")}, threads=2)
    tasks, advisor, rng = room.probe_tasks(n), RoomAdvisor(), random.Random(0)
    wrong = [advisor.wrong(task, rng) for task in tasks]
    here = [from_here(true_stairs_direction(int(task.params["lgen"])) or "") for task in tasks]

    async def play_all(
        hints: Iterable[str | None], *, offer: bool = False, replies: Iterable[str | None] = ()
    ) -> list[EpisodeOutcome]:
        episodes = zip(range(n), tasks, hints, replies or [None] * n, strict=True)
        return await asyncio.gather(
            *(
                play(actor, host, ROOM, i, task, hint=hint, offer=offer, reply=reply)
                for i, task, hint, reply in episodes
            )
        )

    nothing = [None] * n
    try:
        free, right, bad = (
            await play_all(nothing),
            await play_all(map(advisor.right, tasks)),
            await play_all(wrong),
        )
        offered, advised = (
            await play_all(nothing, offer=True),
            await play_all(map(advisor.right, tasks), offer=True),
        )
        helped = await play_all(nothing, offer=True, replies=here)
        verdict_shares = await verdict_metrics(actor, verdicts, SAMPLES_PER_PLACE * n)
    finally:
        await actor.engine.aclose()
        await host.aclose()
    return {
        "success, no advice": [p.success for p in free],
        "success, right advice": [p.success for p in right],
        "success, wrong advice": [p.success for p in bad],
        "asks without an offer": [p.asked for p in (*free, *right, *bad)],
        "asks after an offer, no advice": [p.asked for p in offered],
        "asks after an offer, right advice": [p.asked for p in advised],
        "success after a reply": [p.success for p in helped],
        "asks again after a reply": [p.asked for p in helped],
        "follows the reply": [
            from_here(p.answers[0] or "") == reply
            for p, reply in zip(helped, here, strict=True)
            if "dark" in p.first_observation
        ],
    } | verdict_shares


# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


async def extractor_metrics(path: Path, n: int) -> Metrics:
    extractor = ChatModel.load(path)
    episodes = list(EXTRACTOR_WALKS.episodes(random.Random(5), room.probe_tasks(n)))
    metrics: Metrics = defaultdict(list)
    try:
        lessons = [
            extractor.answer(distil_prompt(episode, i), ANSWER_TOKENS, i)
            for i, episode in enumerate(episodes)
        ]
        for episode, answer in zip(episodes, await asyncio.gather(*lessons), strict=True):
            parsed = parse_ops(answer or "", 1 if episode.hint else 0)
            kind, direction = (
                read(parsed.ops[0].text) if parsed.ops and parsed.ops[0].text else ("none", None)
            )
            metrics["lesson malformed"].append(
                len(parsed.ops) != 1 or bool(parsed.dropped) or kind == "other"
            )
            if kind == "exit":
                metrics["lesson's direction right"].append(
                    direction == stairs_direction(episode.segments)
                )
        rng = random.Random(6)
        stopped = [(episode.task, cut_at_question(episode, rng)) for episode in episodes]
        questions = [(task, segments, bank_lesson(segments, rng)) for task, segments in stopped]
        refined = await asyncio.gather(
            *(
                extractor.answer(refine_prompt(*question), ANSWER_TOKENS, i)
                for i, question in enumerate(questions)
            )
        )
        for (_, segments, text), answer in zip(questions, refined, strict=True):
            kind = (
                "no adaptation needed"
                if read(text)[0] != "exit"
                else "at the start"
                if len(list(visited_cells(segments))) == 1
                else "after some moves"
            )
            metrics[f"refinement right: {kind}"].append(answer == refinement(segments, text))
        for op, right in (
            await right_answers(extractor, merges, ANSWER_TOKENS, SAMPLES_PER_PLACE * n)
        ).items():
            metrics[f"merge right: {op}"] += right
    finally:
        await extractor.engine.aclose()
    return metrics


async def shop_lesson_metrics(path: Path, n: int) -> Metrics:
    episodes = list(webshop_visits.EXTRACTOR_VISITS.episodes(random.Random(5), n))

    def check_lesson(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        kind, name = read_shop(text) if text else ("none", None)
        right = {
            "buy": name == right_brand(episode.segments),
            "skip": name in wrong_brands(episode.segments),
        }
        labels = {"buy": "product right", "skip": "product wrong"}
        return kind, {labels[kind]: right[kind]} if kind in labels else {}

    return await lesson_and_merge_metrics(
        path, "shop", webshop_digest, episodes, check_lesson, webshop_drills.merges
    )


async def house_lesson_metrics(path: Path, n: int) -> Metrics:
    extractor = ChatModel.load(path)
    episodes = list(chores.EXTRACTOR_CHORES.episodes(random.Random(5), alfworld.probe_tasks(n)))

    def check_lesson(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        chore = house_lessons.chore_of(episode.segments)
        kind, place = house_lessons.read(text, chore) if text else ("none", "")
        seen = house_lessons.first_sightings(episode.segments)
        return kind, {"place right": place == seen.get(chore.thing)} if kind == "where" else {}

    try:
        return await lesson_metrics(
            extractor, "house", house_lessons.digest, episodes, check_lesson
        )
    finally:
        await extractor.engine.aclose()


async def search_lesson_metrics(path: Path, n: int) -> Metrics:
    played = replace(search_qa_episodes.EXTRACTOR_EPISODES, world_seeds=OTHER_WORLDS)

    def check_lesson(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        kind, name = search_lessons.read(text) if text else ("none", "")
        right = {
            "search": name == search_lessons.key_name(episode.segments),
            "skip": name in search_lessons.wrong_names(episode.segments),
        }
        labels = {"search": "key right", "skip": "wrong name right"}
        return kind, {labels[kind]: right[kind]} if kind in labels else {}

    episodes = list(played.episodes(random.Random(5), n))
    return await lesson_and_merge_metrics(
        path, "search", search_lessons.digest, episodes, check_lesson, search_drills.merges
    )


async def experiment_lesson_metrics(path: Path, n: int) -> Metrics:
    episodes = list(EXTRACTOR_EXPERIMENTS.episodes(random.Random(5), n))

    def check_lesson(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        kind, thing, room = experiment_lessons.read(text) if text else ("none", "", "")
        seen = experiment_lessons.focused(episode.segments)
        right = {"focus": ("right", thing, room), "never": ("wrong", thing)}
        labels = {"focus": "thing right", "never": "wrong thing right"}
        if kind not in labels:
            return kind, {}
        return kind, {labels[kind]: (seen or ())[: len(right[kind])] == right[kind]}

    return await lesson_and_merge_metrics(
        path, "experiment", experiment_lessons.digest, episodes, check_lesson,
        experiment_drills.merges,
    )  # fmt: skip


LessonCheck = Callable[[str | None, Episode], tuple[str, dict[str, bool]]]
"""Function that returns the kind of a lesson, and whether its claims are right.

None stands for an answer without a lesson.
"""


Demonstrations = Callable[[random.Random, int], Iterator[Demonstration]]
"""Drill: function that yields a number of demonstrations."""


async def lesson_and_merge_metrics(
    path: Path,
    task: str,
    digest: Digest,
    episodes: Sequence[Episode],
    check_lesson: LessonCheck,
    merges: Demonstrations,
) -> Metrics:
    """Return `lesson_metrics`, and whether merges are right, for the extractor in a directory."""
    extractor, n = ChatModel.load(path), SAMPLES_PER_PLACE * len(episodes)
    try:
        metrics = await lesson_metrics(extractor, task, digest, episodes, check_lesson)
        merged = await right_answers(extractor, merges, ANSWER_TOKENS, n)
    finally:
        await extractor.engine.aclose()
    return metrics | {f"{task}: merge right: {op}": right for op, right in merged.items()}


async def lesson_metrics(
    extractor: ChatModel,
    task: str,
    digest: Digest,
    episodes: Sequence[Episode],
    check_lesson: LessonCheck,
) -> Metrics:
    """Return whether answers are well-formed, and whether their claims agree with the episode."""
    metrics: Metrics = defaultdict(list)
    answers = (
        extractor.answer(drill.distil_prompt(digest, e, i), ANSWER_TOKENS, i)
        for i, e in enumerate(episodes)
    )
    for episode, answer in zip(episodes, await asyncio.gather(*answers), strict=True):
        parsed = parse_ops(answer or "", 1 if episode.hint else 0)
        kind, right = check_lesson(parsed.ops[0].text if parsed.ops else None, episode)
        metrics[f"{task}: lesson malformed"].append(
            len(parsed.ops) != 1 or bool(parsed.dropped) or kind == "other"
        )
        for claim, is_right in right.items():
            metrics[f"{task}: lesson's {claim}"].append(is_right)
    return metrics


async def verdict_metrics(model: ChatModel, drill: Demonstrations, n: int) -> Metrics:
    """Return whether verdicts are readable, and whether they follow the success rate."""
    demonstrations = list(drill(random.Random(7), n))
    answers = await asyncio.gather(
        *(model.answer(prompt, VERDICT_TOKENS, i) for i, (*prompt, _) in enumerate(demonstrations))
    )
    metrics: Metrics = defaultdict(list)
    for (*_, demonstrated), answer in zip(demonstrations, answers, strict=True):
        critique, mastered = parse_critique(answer or ""), demonstrated.text == "reject"
        metrics["verdict readable"].append(not critique.malformed)
        metrics[f"rejects, place {'' if mastered else 'not '}mastered"].append(
            critique.verdict == "reject"
        )
    return metrics


async def right_answers(
    model: ChatModel,
    drill: Demonstrations,
    tokens: int,
    n: int,
) -> dict[str, list[bool]]:
    """Return whether the speaker gives the drill's answers, by the first word of the answer."""
    demonstrations = list(drill(random.Random(7), n))
    answers = await asyncio.gather(
        *(model.answer(prompt, tokens, i) for i, (*prompt, _) in enumerate(demonstrations))
    )
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for (*_, demonstrated), answer in zip(demonstrations, answers, strict=True):
        word = (
            demonstrated.text.split('"')[3]
            if '"op"' in demonstrated.text
            else demonstrated.text.split()[0]
        )
        right[word].append(answer == demonstrated.text)
    return dict(sorted(right.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, help="directory that contains tiny-actor and tiny-extractor"
    )
    parser.add_argument("--places", type=int, default=512, help="number of places of each task")
    parser.add_argument("--out", type=Path, help="file for the metrics, as JSON")
    arguments = parser.parse_args()
    require_simulators(experiment_drills.ACTOR_DRILLS)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    measurements = {
        "tiny-actor": (
            actor_metrics, shop_metrics, house_metrics, grid_metrics, search_metrics,
            experiment_metrics,
        ),
        "tiny-extractor": (
            extractor_metrics, shop_lesson_metrics, house_lesson_metrics, search_lesson_metrics,
            experiment_lesson_metrics,
        ),
    }  # fmt: skip
    shares: dict[str, dict[str, dict[str, int]]] = {}
    for name, functions in measurements.items():
        path = arguments.models / name if arguments.models else resolve_model(name)
        print(name)
        shares[name] = {}
        for measure in functions:
            for metric, outcomes in asyncio.run(measure(path, arguments.places)).items():
                right, n = sum(outcomes), len(outcomes)
                print(f"  {metric:<44} {SuccessRate(right, n)}  n {n}")
                shares[name][metric] = {"true": right, "n": n}
    if arguments.out:
        arguments.out.write_text(json.dumps(shares, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
