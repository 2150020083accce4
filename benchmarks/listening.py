"""Reasons why a trained actor stops following advice, measured in the room during training.

    python benchmarks/listening.py --seeds 0 1 2
    python benchmarks/listening.py --seeds 0 1 2 --steps 80 --set retrieval.per=group \\
        --set retrieval.trial_share=0.0 --set bank.max_per_goal=4 \\
        --set actor.optimizer.warmup_steps=0 --set complementary.lift_coef=0.0 \\
        --out benchmarks/results/listening_eq5.json

The second command measures eq. 5 alone, with one lesson per group.

The measurements are made before the updates of every MEASURE_EVERY-th step, on the first turn of
fixed probe places:

* `right`, `wrong`: mean log-probability (nats) of the advised first move under right and under
  wrong advice. Both are high for an actor that listens, and low for an actor that ignores advice.
* `projection`, for each term of the actor's policy gradient (free episodes, and guided episodes by
  the kind of their lesson): −∇loss_term · ∇right / (‖∇loss‖ ‖∇right‖). A positive value means that
  the term teaches the actor to follow right advice. The sum over the terms is the cosine between
  the update direction and the direction of better listening.
* `flat`: share of the term's episodes with advantage 0, because all members of their group half won
  or all lost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arms import Recorder
from common import mean_and_interval, write_results

MEASURE_EVERY = 5
"""Steps between two measurements."""
PROBE_PLACES = 64
"""Probe places."""
TERMS = ("free", "nothing found", "right lesson", "wrong direction", "other lesson")
"""Kinds of episodes by which the policy gradient is divided."""


def measured_run(seed: int, steps: int | None, sets: Sequence[str]) -> list[dict[str, Any]]:
    """Train in the room and return one row per measured step."""
    from crl.config import load

    unused = [
        *(f"tasks.room.eval.{name}=0" for name in ("seen", "unseen", "online_places")),
        "eval.probe_every=0",
    ]
    options = {"run.seed": seed} | ({"run.steps": steps} if steps is not None else {})
    config = load(["room"], options=options, sets=[*unused, *sets])
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(config, Path(folder)))


async def _train(config: Any, folder: Path) -> list[dict[str, Any]]:
    from crl.evaluation.evaluate import Evaluation
    from crl.monitor.run_dir import RunDir
    from crl.run.assemble import open_training_loop

    recorder = Recorder()
    async with open_training_loop(config, RunDir(folder), recorder) as loop:
        for step in (0, config.run.steps):
            loop.measurements.evaluations[step] = Evaluation({}, {}, 0)
        probe = GradientProbe(
            loop,
            {advice: await advised_traces(loop, config, advice) for advice in ("right", "wrong")},
        )
        recorder.trajectories = probe.observe  # called with the batch before its update
        await loop.run()
    return probe.rows


async def advised_traces(loop: Any, config: Any, advice: str) -> list[Any]:
    """Return the first turns of the probe places under right or wrong advice.

    The advised move is marked as sampled.
    """
    from crl.envs.room.lessons import read
    from crl.evaluation.probe import FixedRetriever, advice_texts
    from crl.planning.tasks import probe_tasks, specs
    from crl.rollout.episode import EpisodeKey
    from crl.types import Completion, TokenTrace

    task = probe_tasks(config, specs(config))["room"]
    task = replace(task, places=task.places[:PROBE_PLACES])
    texts = advice_texts(task, advice)
    evaluator = loop.measurements.evaluator
    runner = replace(evaluator.runner, retriever=FixedRetriever(texts))
    keys = [EpisodeKey("listening", 0, i, 0) for i in range(len(task.places))]
    trajectories = await evaluator.scheduler.play(runner, "guided", keys, task.places)
    traces = []
    for trajectory in trajectories:
        trace, direction = trajectory.traces[0], read(texts[trajectory.task.goal])[1]
        renderer = runner.decoding.renderer
        move = (*renderer.encode(direction), renderer.stop_ids[0])
        prompt = TokenTrace().with_context(trace.ids[: trace.mask.index(1)])
        traces.append(
            prompt.with_sampled(Completion(move, (0.0,) * len(move), (0,) * len(move), "stop"))
        )
    return traces


class GradientProbe:
    """Measurements before updates. `rows` holds the results."""

    def __init__(self, loop: Any, probes: Mapping[str, Sequence[Any]]) -> None:
        """Prepare the measurements. `probes`: traces by advice."""
        from crl.envs.room import SPEC

        assert SPEC.curriculum.advisor is not None
        self._loop, self._probes, self._advisor = loop, probes, SPEC.curriculum.advisor
        self._trainer = loop.actor.learner._trainer
        self._step = 0
        self.rows: list[dict[str, Any]] = []

    def observe(self, trajectories: Sequence[Any]) -> None:
        if self._step % MEASURE_EVERY == 0:
            self.rows.append(self._measure([t for t in trajectories if t.error is None]))
        self._step += 1

    def _measure(self, trajectories: Sequence[Any]) -> dict[str, Any]:
        import torch

        from crl.algo import build_minibatches
        from crl.seeds import generator

        right, right_gradient = self._log_probability(self._probes["right"])
        row: dict[str, Any] = {
            "step": self._step,
            "right": right,
            "wrong": self._log_probability(self._probes["wrong"])[0],
        }
        advantages, terms = (
            self._loop._advantages(trajectories),
            [self._term(t) for t in trajectories],
        )
        views = [self._loop.method.actor.view(t, self._loop.actor.rerender) for t in trajectories]
        gradients = {}
        for term in TERMS:
            term_advantages = [
                advantage if term_of == term else 0.0
                for advantage, term_of in zip(advantages, terms, strict=True)
            ]
            batches = build_minibatches(
                trajectories, term_advantages, views, count=1, rng=generator(0, "listening")
            )
            gradients[term] = self._gradient(batches[0]) if batches else 0 * right_gradient
            row[f"{term}/episodes"] = terms.count(term)
            if term in terms:
                row[f"{term}/flat"] = sum(
                    a == 0 for a, term_of in zip(advantages, terms, strict=True) if term_of == term
                ) / terms.count(term)
        total = torch.stack(list(gradients.values())).sum(0)
        for term, gradient in gradients.items():
            row[f"{term}/projection"] = float(
                -(gradient @ right_gradient)
                / (total.norm() * right_gradient.norm()).clamp(min=1e-12)
            )
        return row

    def _term(self, trajectory: Any) -> str:
        if trajectory.condition == "free":
            return "free"
        if not trajectory.guidance.shown:
            return "nothing found"
        verdict = self._advisor.judge(trajectory.task, trajectory.guidance.shown[0])
        return (
            "right lesson"
            if verdict.correct
            else "wrong direction"
            if verdict.kind == "wrong exit"
            else "other lesson"
        )

    def _log_probability(self, traces: Sequence[Any]) -> tuple[float, Any]:
        """Return a mean log-probability and its gradient.

        The log-probabilities of the marked tokens are summed within a trace and averaged over
        traces.
        """
        from crl.learners.step import MicroBatch
        from crl.types import TrainSample

        batch = MicroBatch.of(
            [TrainSample(trace, 1.0, 1.0) for trace in traces], self._trainer.model.device
        )
        mean = self._trainer._token_stats(batch).logp.mul(batch.mask).sum() / len(traces)
        self._trainer.optimizer.zero_grad(set_to_none=True)
        mean.backward()
        return mean.item(), self._take_gradient()

    def _gradient(self, minibatch: Any) -> Any:
        from crl.learners.step import MetricAccumulator

        self._trainer._gradient(minibatch, MetricAccumulator(), None)
        return self._take_gradient()

    def _take_gradient(self) -> Any:
        """Return the gradient of all parameters as one vector, and clear it."""
        import torch

        gradient = torch.cat(
            [
                p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
                for p in self._trainer.model.parameters()
            ]
        )
        self._trainer.optimizer.zero_grad(set_to_none=True)
        return gradient


def table(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table of means over seeds, by quarters of the run."""
    length = min(len(rows) for rows in runs.values())
    quarters = [range(q * length // 4, (q + 1) * length // 4) for q in range(4)]
    lines = [f"{'':<30}" + "".join(f"{f'quarter {q}':>18}" for q in range(1, 5))]
    names = [
        "right",
        "wrong",
        *(
            f"{term}/{quantity}"
            for term in TERMS
            for quantity in ("episodes", "flat", "projection")
        ),
    ]
    for name in names:
        cells = []
        for quarter in quarters:
            seeds = [[rows[i][name] for i in quarter if name in rows[i]] for rows in runs.values()]
            cells.append(
                mean_and_interval([statistics.fmean(values) for values in seeds if values])
            )
        lines.append(f"{name:<30}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="number of actor steps (default: the preset's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all runs"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    runs: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for seed in arguments.seeds:
        runs[seed] = measured_run(seed, arguments.steps, arguments.set)
    print(table(runs))
    if arguments.out:
        write_results(
            arguments.out,
            {"set": arguments.set, "runs": [{"seed": s, "rows": rows} for s, rows in runs.items()]},
        )


if __name__ == "__main__":
    main()
