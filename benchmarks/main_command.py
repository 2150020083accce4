"""Co-evolution compared with a frozen partner: the main command, and the room alone, by arm.

    python benchmarks/main_command.py --jobs 2 --out benchmarks/results/main_command.json

Arms (`arms.py`):

* `none`: --method grpo with an equal number of rollouts;
* `static`: the extractor distils and is not trained;
* `co-evolved`: the default;
* `experience only`: the actor is not trained;
* `always right`: episodes are guided by the truth, which is the upper bound.

Settings: `room` is `crl train --tasks room`; `mixture` is
`crl train --tasks room,webshop,alfworld`.

The metrics were fixed before the runs. They are those of the evaluation after the last step, by
task, sampled at temperature 1:

* `online`: success in places that are never trained on, visits 3 to 5, with a bank that is built
  during these visits. The arm `none` has no bank and plays without one. The arm `always right`
  uses the truth instead.
* `alone`: success in the same episodes without experience.
* `unseen`, `seen`: success without experience in places that are never trained on, and in places of
  the train stream.
* `seen, bank`: success in seen places with the run's bank.
* `lessons`: share of right lessons among the extractor's answers. For comparison, the share of the
  initial extractor on the same episodes.
* `advice`: benefit of right advice on the advice probe, (right − none) / (1 − none).

Nothing was tuned on seeds 10 to 14. The unit is the seed: mean ± half the 95 % interval by
Student's t, differences paired by seed. All arms of a seed play the same tasks with the same draws.
Places that are never trained on are the same for all seeds. Training is asynchronous. Therefore
arms also differ by timing, and two runs of one arm and seed are not identical. If an aim is a
multiple of another metric, the table shows the difference from this multiple. The difference has an
interval even if the denominator of a ratio could be 0.

Finished runs are stored in a .jsonl file beside --out and are not repeated. Interrupted runs start
again from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from arms import ARMS, Run, run_and_print, run_missing, sweep_parser
from common import mean_and_interval, write_results

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "room": ("room",),
    "mixture": ("room", "webshop", "alfworld"),
}
SEEDS = (10, 11, 12, 13, 14)
Metric = Callable[[Run, str], float | None]
"""Function from a run and a task to a value."""


def recorded(name: str) -> Metric:
    """Return a metric that the run's last evaluation logged.

    `name`: key of the metric, with {} for the task.
    """
    return lambda run, task: run["metrics"].get(name.format(task))


def advice(end: str) -> Metric:
    """Return the metric of the benefit of right advice. `end`: "start" or "end" of the run."""

    def benefit(run: Run, task: str) -> float | None:
        none, right = (run["metrics"][f"{end}/probe/{task}/{kind}"] for kind in ("none", "right"))
        return (right - none) / (1 - none) if none < 1 else None

    return benefit


def scaled(factor: float, metric: Metric) -> Metric:
    """Return a multiple of the metric."""

    def product(run: Run, task: str) -> float | None:
        value = metric(run, task)
        return None if value is None else factor * value

    return product


METRICS: Mapping[str, Metric] = {
    "online": recorded("eval/{}/unseen/success/online"),
    "alone": recorded("eval/{}/unseen/success/alone"),
    "unseen": recorded("eval/{}/unseen/success/free"),
    "seen": recorded("eval/{}/seen/success/free"),
    "seen, bank": recorded("eval/{}/seen/success/guided"),
    "lessons": recorded("eval/{}/lessons/correct"),
    "lessons, untrained": recorded("eval/{}/lessons/correct/untrained"),
    "3 × lessons, untrained": scaled(3, recorded("eval/{}/lessons/correct/untrained")),
    "probe none": recorded("end/probe/{}/none"),
    "probe right": recorded("end/probe/{}/right"),
    "advice, start": advice("start"),
    "advice": advice("end"),
    "0.9 × advice, start": scaled(0.9, advice("start")),
}

PAIRS = (
    ("online", "co-evolved", "online", "none"),
    ("online", "co-evolved", "online", "static"),
    ("online", "co-evolved", "online", "experience only"),
    ("online", "always right", "online", "co-evolved"),
    ("alone", "co-evolved", "alone", "experience only"),
    ("alone", "co-evolved", "alone", "none"),
    ("unseen", "co-evolved", "unseen", "none"),
    ("seen", "co-evolved", "seen", "none"),
    ("seen, bank", "co-evolved", "seen", "none"),
    ("lessons", "co-evolved", "lessons", "static"),
    ("lessons", "co-evolved", "3 × lessons, untrained", "co-evolved"),
    ("advice", "co-evolved", "0.9 × advice, start", "co-evolved"),
)
"""Comparisons: metric and arm, then the metric and the arm with which they are compared."""


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def tables(runs: Sequence[Run]) -> str:
    """Return, for each setting and task, every metric by arm and the paired differences."""
    lines: list[str] = []
    for setting, tasks in SETTINGS.items():
        setting_runs = [run for run in runs if run["setting"] == setting]
        for task in tasks if setting_runs else ():
            lines += [
                f"{setting}: {task}",
                *metric_rows(setting_runs, task),
                *pair_rows(setting_runs, task),
                "",
            ]
        if setting_runs:
            lines += [*cost_rows(setting_runs), ""]
    return "\n".join(lines)


def metric_rows(runs: Sequence[Run], task: str) -> list[str]:
    arms = [arm for arm in ARMS if any(run["arm"] == arm for run in runs)]
    rows = [f"  {'':<20}" + "".join(f"{arm:>18}" for arm in arms)]
    for name, metric in METRICS.items():
        cells = (
            mean_and_interval([metric(run, task) for run in runs if run["arm"] == arm])
            for arm in arms
        )
        rows.append(f"  {name:<20}" + "".join(f"{cell:>18}" for cell in cells))
    return rows


def pair_rows(runs: Sequence[Run], task: str) -> list[str]:
    rows = []
    for name, arm, other, other_arm in PAIRS:
        first, second = (
            {run["seed"]: METRICS[m](run, task) for run in runs if run["arm"] == a}
            for m, a in ((name, arm), (other, other_arm))
        )
        pairs = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if pairs:
            by_seed = " ".join(f"{difference:+.3f}" for difference in differences)
            label = (
                f"{name}, {arm} − {other}, {other_arm}"
                if name != other
                else f"{name}: {arm} − {other_arm}"
            )
            rows.append(f"  {label}: {mean_and_interval(differences)}   by seed {by_seed}")
    return rows


def cost_rows(runs: Sequence[Run]) -> list[str]:
    """Return the training cost of each arm, as means over seeds.

    The cost is counted in environment turns and sampled tokens.
    """
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        totals = [run["totals"] for run in runs if run["arm"] == arm]
        names = sorted(set.intersection(*map(set, totals)))
        means = (
            f"{name.removeprefix('total/')} {fmean(run[name] for run in totals):,.0f}"
            for name in names
        )
        rows.append(f"  {arm}: {', '.join(means)}")
    return rows


def main() -> None:
    parser = sweep_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    if arguments.one:
        setting, arm, seed = arguments.one
        run_and_print(ARMS[arm], SETTINGS[setting], int(seed), arguments)
        return
    wanted = [
        (setting, arm, seed)
        for setting in arguments.settings
        for seed in arguments.seeds
        for arm in arguments.arms
    ]
    runs = run_missing(__file__, wanted, arguments)
    print(tables(runs))
    write_results(arguments.out, {"jobs": arguments.jobs, "runs": runs})


if __name__ == "__main__":
    main()
