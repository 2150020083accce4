"""Skills of the bundled models before RL, on places and chunks that were not in their training.

    python benchmarks/warm_start.py --models DIRECTORY

DIRECTORY is the output of `crl make-models`; without --models, the shipped models are measured.
Answers are sampled at temperature 1. Every metric is a share with its 95 % Wilson interval. An
answer is right if it equals the demonstrator's answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from crl.config.models import resolve_model
from crl.engines.torch import TorchEngine
from crl.envs import alfworld, room, webshop
from crl.envs.alfworld import lessons as house_lessons
from crl.envs.base import EnvSpec
from crl.envs.host import ThreadHost
from crl.envs.room.lessons import (
    RoomAdvisor,
    from_here,
    places,
    read,
    stairs_direction,
    true_bearing,
)
from crl.envs.webshop.lessons import digest as webshop_digest
from crl.envs.webshop.lessons import read as read_shop
from crl.envs.webshop.lessons import right_brand, wrong_brands
from crl.errors import RolloutError
from crl.manager.ops import parse_ops
from crl.methods.parts.asking import COMPACT_CALL
from crl.methods.parts.distilling import Digest
from crl.methods.parts.rollouts import ChatContext
from crl.modeling import load_model, load_tokenizer, stop_ids
from crl.models.drills import alfworld_chores, drill, grids, webshop_visits
from crl.models.drills import webshop as webshop_drills
from crl.models.drills.alfworld_houses import SmallHouse
from crl.models.drills.drill import OFFER, Episode
from crl.models.drills.room import (
    distil_prompt,
    found,
    merges,
    refine_prompt,
    refinement,
    until_asked,
    verdicts,
)
from crl.models.drills.room_walks import EXTRACTOR_WALKS, SCORED_TURNS
from crl.models.warm_start import Demonstration
from crl.protocols import Hit
from crl.rollout.critic import parse_critique
from crl.run.evaluate import SuccessRate
from crl.tokens import ChatRenderer
from crl.types import ExperienceUse, Sampling, Segment, Task

VERDICT_TOKENS, ANSWER_TOKENS = 24, 40
"""Maximal tokens of a verdict and of an extractor's answer, as in tasks/presets/cpu.toml."""

Metrics = dict[str, list[bool]]
"""Outcomes by metric."""


@dataclass(frozen=True)
class Course:
    """Task with the limits of a run of tiny models, as in tasks/TASK.toml."""

    spec: EnvSpec
    turns: int
    """Turns of an episode."""
    tokens: int
    """Maximal tokens of an answer."""


ROOM, SHOP = Course(room.SPEC, SCORED_TURNS, 4), Course(webshop.SPEC, webshop_visits.TURNS, 24)
HOUSE = Course(
    replace(alfworld.SMALL_SPEC, hosting="threads", make_game=lambda rendering: SmallHouse()),
    alfworld_chores.TURNS,
    16,
)


@dataclass(frozen=True)
class Speaker:
    """Model that answers conversations."""

    engine: TorchEngine
    chat: ChatRenderer

    @classmethod
    def of(cls, path: Path) -> Speaker:
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
class Played:
    """Outcome of an episode."""

    seen: str
    """First observation."""
    said: tuple[str | None, ...]
    """Actor's answers; None for an answer that exceeded the token limit."""
    success: bool

    @property
    def asked(self) -> bool:
        """Whether the actor asked a question."""
        return COMPACT_CALL in self.said


async def play(
    actor: Speaker, host: ThreadHost, course: Course, number: int, task: Task, *,
    hint: str | None = None, offer: bool = False, reply: str | None = None,
) -> Played:  # fmt: skip
    """Play one scored episode.

    `reply`: reply to a question that the actor is made to ask at the start. If the actor asks a
    question itself, the episode ends.
    """
    env = await host.acquire(task)
    context = ChatContext({task.name: ""})
    try:
        shown = Hit(hint, ExperienceUse("told", 1, "told", "start")) if hint else None
        *head, seen = context.opening(task, await env.reset(task), shown)
        segments, said = [*head, *([OFFER] if offer else []), seen], list[str | None]()
        if reply:
            segments += [
                Segment("assistant", COMPACT_CALL, "tool_call"),
                Segment("user", reply, "tool_result"),
            ]
        for turn in range(course.turns):
            try:
                said.append(await actor.answer(segments, course.tokens, 100 * number + turn))
            except RolloutError:  # the context is full; the episode is lost, as in a run
                break
            if said[-1] == COMPACT_CALL:
                break
            result = await env.step(said[-1] or "")
            if result.done:
                return Played(seen.text, tuple(said), result.success)
            segments += [Segment("assistant", said[-1] or "", "policy"), *context.following(result)]
        return Played(seen.text, tuple(said), success=False)
    finally:
        await host.release(env)


async def told_figures(actor: Speaker, course: Course, name: str, tasks: Sequence[Task]) -> Metrics:
    """Return success and truncation of answers, by the advice that the actor receives.

    Without an advisor, only episodes without advice are played.
    """
    advisor, rng, metrics = course.spec.advisor, random.Random(0), Metrics()
    told: dict[str, list[str | None]] = {"nothing": [None] * len(tasks)}
    if advisor:
        told |= {
            "the truth": [*map(advisor.right, tasks)],
            "what is wrong": [advisor.wrong(task, rng) for task in tasks],
        }
    host = ThreadHost({course.spec.name: (course.spec, "compact")}, threads=2)
    try:
        for what, hints in told.items():
            episodes = (
                play(actor, host, course, i, task, hint=hint)
                for i, (task, hint) in enumerate(zip(tasks, hints, strict=True))
            )
            played = await asyncio.gather(*episodes)
            metrics[f"{name}: success, told {what}"] = [p.success for p in played]
            metrics[f"{name}: answers cut, told {what}"] = [None in p.said for p in played]
    finally:
        await host.aclose()
    return metrics


async def shop_figures(path: Path, n: int) -> Metrics:
    actor = Speaker.of(path)
    try:
        metrics = await told_figures(actor, SHOP, "shop", webshop.probe_tasks(n))
        judged = await verdict_figures(actor, webshop_drills.verdicts)
    finally:
        await actor.engine.aclose()
    return metrics | {f"shop: {name}": found for name, found in judged.items()}


async def house_figures(path: Path, n: int) -> Metrics:
    actor = Speaker.of(path)
    try:
        return await told_figures(actor, HOUSE, "house", alfworld.probe_tasks(n))
    finally:
        await actor.engine.aclose()


async def grid_figures(path: Path, n: int) -> Metrics:
    actor, metrics = Speaker.of(path), Metrics()
    try:
        for grid in (grids.MAZE, grids.KEYROOM, grids.RIVER, grids.SOKOBAN):
            course = Course(grid.spec, grid.scored, 8)
            metrics |= await told_figures(actor, course, grid.spec.name, grid.places.probe_tasks(n))
    finally:
        await actor.engine.aclose()
    return metrics


async def actor_figures(path: Path, n: int) -> Metrics:
    actor, host = Speaker.of(path), ThreadHost({room.NAME: (room.SPEC, "compact")}, threads=2)
    tasks, advisor, rng = room.probe_tasks(n), RoomAdvisor(), random.Random(0)
    wrong = [advisor.wrong(task, rng) for task in tasks]
    here = [from_here(true_bearing(int(task.params["lgen"])) or "") for task in tasks]

    async def played(
        hints: Iterable[str | None], *, offer: bool = False, replies: Iterable[str | None] = ()
    ) -> list[Played]:
        told = zip(range(n), tasks, hints, replies or [None] * n, strict=True)
        return await asyncio.gather(
            *(
                play(actor, host, ROOM, i, task, hint=hint, offer=offer, reply=reply)
                for i, task, hint, reply in told
            )
        )

    nothing = [None] * n
    try:
        free, right, bad = (
            await played(nothing),
            await played(map(advisor.right, tasks)),
            await played(wrong),
        )
        offered, advised = (
            await played(nothing, offer=True),
            await played(map(advisor.right, tasks), offer=True),
        )
        helped = await played(nothing, offer=True, replies=here)
        judged = await verdict_figures(actor, verdicts)
    finally:
        await actor.engine.aclose()
        await host.aclose()
    return {
        "success, told nothing": [p.success for p in free],
        "success, told the truth": [p.success for p in right],
        "success, told what is wrong": [p.success for p in bad],
        "asks, not offered": [p.asked for p in (*free, *right, *bad)],
        "asks, offered, told nothing": [p.asked for p in offered],
        "asks, offered, told the truth": [p.asked for p in advised],
        "success, asked and was answered": [p.success for p in helped],
        "asks again": [p.asked for p in helped],
        "goes as it was answered": [
            from_here(p.said[0] or "") == told
            for p, told in zip(helped, here, strict=True)
            if "dark" in p.seen
        ],
    } | judged


# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


async def extractor_figures(path: Path, n: int) -> Metrics:
    extractor = Speaker.of(path)
    episodes = list(EXTRACTOR_WALKS.episodes(random.Random(5), room.probe_tasks(n)))
    metrics: Metrics = defaultdict(list)
    try:
        lessons = [
            extractor.answer(distil_prompt(episode, i), ANSWER_TOKENS, i)
            for i, episode in enumerate(episodes)
        ]
        for episode, written in zip(episodes, await asyncio.gather(*lessons), strict=True):
            parsed = parse_ops(written or "", 1 if episode.hint else 0)
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
        stopped = [(episode.task, until_asked(episode, rng)) for episode in episodes]
        asked = [(task, segments, found(segments, rng)) for task, segments in stopped]
        refined = await asyncio.gather(
            *(
                extractor.answer(refine_prompt(*each), ANSWER_TOKENS, i)
                for i, each in enumerate(asked)
            )
        )
        for (_, segments, text), written in zip(asked, refined, strict=True):
            kind = (
                "nothing to fit"
                if read(text)[0] != "exit"
                else "at the start"
                if len(list(places(segments))) == 1
                else "on the way"
            )
            metrics[f"refinement right: {kind}"].append(written == refinement(segments, text))
        for op, right in (await right_answers(extractor, merges, ANSWER_TOKENS)).items():
            metrics[f"merge right: {op}"] += right
    finally:
        await extractor.engine.aclose()
    return metrics


async def shop_lesson_figures(path: Path, n: int) -> Metrics:
    extractor = Speaker.of(path)
    episodes = list(webshop_visits.EXTRACTOR_VISITS.episodes(random.Random(5), n))

    def claims(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        kind, name = read_shop(text) if text else ("none", None)
        right = {
            "buy": name == right_brand(episode.segments),
            "skip": name in wrong_brands(episode.segments),
        }
        told = {"buy": "product right", "skip": "product wrong, as said"}
        return kind, {told[kind]: right[kind]} if kind in told else {}

    try:
        metrics = await lesson_figures(extractor, "shop", webshop_digest, episodes, claims)
        merged = await right_answers(extractor, webshop_drills.merges, ANSWER_TOKENS)
    finally:
        await extractor.engine.aclose()
    return metrics | {f"shop: merge right: {op}": right for op, right in merged.items()}


async def house_lesson_figures(path: Path, n: int) -> Metrics:
    extractor = Speaker.of(path)
    episodes = list(
        alfworld_chores.EXTRACTOR_CHORES.episodes(random.Random(5), alfworld.probe_tasks(n))
    )

    def claims(text: str | None, episode: Episode) -> tuple[str, dict[str, bool]]:
        chore = house_lessons.chore_of(episode.segments)
        kind, place = house_lessons.read(text, chore) if text else ("none", "")
        seen = house_lessons.sights(episode.segments)
        return kind, {"place right": place == seen.get(chore.thing)} if kind == "where" else {}

    try:
        return await lesson_figures(extractor, "house", house_lessons.digest, episodes, claims)
    finally:
        await extractor.engine.aclose()


Claims = Callable[[str | None, Episode], tuple[str, dict[str, bool]]]
"""Function that returns the kind of a lesson, and whether its claims are right.

None stands for an answer without a lesson.
"""


async def lesson_figures(
    extractor: Speaker, task: str, digest: Digest, episodes: Sequence[Episode], claims: Claims
) -> Metrics:
    """Return whether answers are well-formed, and whether their claims agree with the episode."""
    metrics: Metrics = defaultdict(list)
    asked = (
        extractor.answer(drill.distil_prompt(digest, e, i), ANSWER_TOKENS, i)
        for i, e in enumerate(episodes)
    )
    for episode, written in zip(episodes, await asyncio.gather(*asked), strict=True):
        parsed = parse_ops(written or "", 1 if episode.hint else 0)
        kind, right = claims(parsed.ops[0].text if parsed.ops else None, episode)
        metrics[f"{task}: lesson malformed"].append(
            len(parsed.ops) != 1 or bool(parsed.dropped) or kind == "other"
        )
        for what, true in right.items():
            metrics[f"{task}: lesson's {what}"].append(true)
    return metrics


async def verdict_figures(
    speaker: Speaker, drill: Callable[[random.Random, int], Iterator[Demonstration]], n: int = 1000
) -> Metrics:
    """Return whether verdicts are readable, and whether they follow the success rate."""
    demonstrations = list(drill(random.Random(7), n))
    answers = await asyncio.gather(
        *(
            speaker.answer(prompt, VERDICT_TOKENS, i)
            for i, (*prompt, _) in enumerate(demonstrations)
        )
    )
    metrics: Metrics = defaultdict(list)
    for (*_, said), answer in zip(demonstrations, answers, strict=True):
        critique, mastered = parse_critique(answer or ""), said.text == "reject"
        metrics["verdict readable"].append(not critique.malformed)
        metrics[f"rejects, place {'' if mastered else 'not '}mastered"].append(
            critique.verdict == "reject"
        )
    return metrics


async def right_answers(
    speaker: Speaker,
    drill: Callable[[random.Random, int], Iterator[Demonstration]],
    tokens: int,
    n: int = 1000,
) -> dict[str, list[bool]]:
    """Return whether the speaker gives the drill's answers, by the first word of the answer."""
    demonstrations = list(drill(random.Random(7), n))
    answers = await asyncio.gather(
        *(speaker.answer(prompt, tokens, i) for i, (*prompt, _) in enumerate(demonstrations))
    )
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for (*_, said), answer in zip(demonstrations, answers, strict=True):
        word = said.text.split('"')[3] if '"op"' in said.text else said.text.split()[0]
        right[word].append(answer == said.text)
    return dict(sorted(right.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, help="a directory with tiny-actor and tiny-extractor"
    )
    parser.add_argument("--places", type=int, default=512, help="of each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measures = {
        "tiny-actor": (actor_figures, shop_figures, house_figures, grid_figures),
        "tiny-extractor": (extractor_figures, shop_lesson_figures, house_lesson_figures),
    }
    for name, measured in measures.items():
        path = arguments.models / name if arguments.models else resolve_model(name)
        print(name)
        for measure in measured:
            for figure, found_true in asyncio.run(measure(path, arguments.places)).items():
                print(
                    f"  {figure:<42} {SuccessRate(sum(found_true), len(found_true))}  n {len(found_true)}"
                )


if __name__ == "__main__":
    main()
