"""Effect of each switch on listening, on the extractor's lessons and on success, in the room.

    python benchmarks/switches.py --jobs 2 --out benchmarks/results/switches.json
    python benchmarks/switches.py --grpo --jobs 2 --out benchmarks/results/grpo_switches.json

Each row is `crl train --tasks room` with the preset and some other settings. Seeds 0 to 2 are seeds
for tuning. `online`, `alone`, `seen`, `lessons` and `advice` are the metrics of `main_command.py`.
`updates` is the number of updates of the extractor. Rows are compared with the preset, paired by
seed: mean ± half the 95 % interval by Student's t.

With --grpo, all rows train the actor alone (`--method grpo`). `training` is the success of the last
LAST_STEPS training steps. The best row is the one with the highest mean of `training` and `seen`
over the seeds. This rule was fixed before the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from arms import Arm, Run, run_and_print, run_missing, sweep_parser
from common import mean_and_interval, write_results
from figures import LAST_STEPS
from main_command import METRICS, Metric

PRESET = "the preset"
SEEDS = (0, 1, 2)


def training(run: Run, _task: str) -> float:
    """Return the success of the free episodes of the last training steps."""
    return fmean(run["curves"]["success/free"][-LAST_STEPS:])


TABLE_METRICS: Mapping[str, Metric] = {
    name: METRICS[name] for name in ("online", "alone", "seen", "lessons", "advice")
} | {"updates": lambda run, _task: run["extractor updates"]}
RULE = ("training", "seen")
"""Metrics whose mean decides which settings of the actor alone are best."""
GRPO_METRICS: Mapping[str, Metric] = {
    "training": training,
    **{name: METRICS[name] for name in ("seen", "unseen", "alone")},
}

EQUATION_6 = (
    "retrieval.choice=diverse",
    "retrieval.per=group",
    "retrieval.trial_share=0.0",
    "bank.max_per_goal=1000000",
    "bank.evict=fifo",
)
"""Eq. 6 in an unbounded bank, among lessons as similar as the preset requires."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    PRESET: (),
    "eq. 5 alone": ("complementary.lift_coef=0.0",),
    "lift advantage 2": ("complementary.lift_coef=2.0",),
    "advantages across the group": ("complementary.advantages=cross",),
    "KL of the actor to its start 0.1": ("actor.kl_coef=0.1",),
    "self-distillation 0.5": ("complementary.self_distillation=0.5",),
    "record in the prompt": ("complementary.show_record=true",),
    "actor's learning rate halved": ("actor.optimizer.learning_rate=1e-4",),
    "no warm-up of the actor": ("actor.optimizer.warmup_steps=0",),
    "eq. 6, one search for a group": EQUATION_6,
    "eq. 6, one search for a group, eq. 5 alone": (*EQUATION_6, "complementary.lift_coef=0.0"),
    "no trials": ("retrieval.trial_share=0.0",),
    "4 lessons a place": ("bank.max_per_goal=4",),
    "16 lessons a place": ("bank.max_per_goal=16",),
    "guided share 0.25": ("complementary.guided_share=0.25",),
    "guided share 0.75": ("complementary.guided_share=0.75",),
    "extractor's batch 16": ("extractor.batch=16",),
    "extractor's baseline its batch": ("extractor.baseline=batch",),
}
"""Settings by name of the change."""

GRPO_SWITCHES: Mapping[str, tuple[str, ...]] = {
    name: ("method=grpo", *sets)
    for name, sets in {
        PRESET: (),
        "half the learning rate": ("actor.optimizer.learning_rate=1e-4",),
        "twice the learning rate": ("actor.optimizer.learning_rate=4e-4",),
        "four times the learning rate": ("actor.optimizer.learning_rate=8e-4",),
        "no warm-up": ("actor.optimizer.warmup_steps=0",),
        "half the learning rate, no warm-up": (
            "actor.optimizer.learning_rate=1e-4",
            "actor.optimizer.warmup_steps=0",
        ),
        "twice the learning rate, no warm-up": (
            "actor.optimizer.learning_rate=4e-4",
            "actor.optimizer.warmup_steps=0",
        ),
        "KL to the start 0.1": ("actor.kl_coef=0.1",),
        "32 groups of 4": ("rollout.groups=32", "rollout.group_size=4"),
        "8 groups of 16": ("rollout.groups=8", "rollout.group_size=16"),
        "4 minibatches": ("actor.minibatches=4",),
        "advantages without scale": ("actor.advantage_scale=none",),
        "upper clip width 0.28": ("actor.clip_high=0.28",),
    }.items()
}
"""Settings of the actor alone, by name of the change. The number of episodes is the preset's."""

ROOM, GRPO = "room", "room, GRPO alone"
SETTINGS = {ROOM: (SWITCHES, TABLE_METRICS), GRPO: (GRPO_SWITCHES, GRPO_METRICS)}
"""Switches and columns of the table, by setting of the runs."""


def table(runs: Sequence[Run], switches: Sequence[str], metrics: Mapping[str, Metric]) -> str:
    """Return a table with one row per switch.

    A row holds the metrics over seeds and their differences from the preset in the same seeds.
    """
    lines = [f"{'':<50}" + "".join(f"{name:>18}{'− preset':>18}" for name in metrics)]
    for switch in switches:
        cells = []
        for metric in metrics.values():
            own, preset = (
                {run["seed"]: metric(run, "room") for run in runs if run["arm"] == arm}
                for arm in (switch, PRESET)
            )
            pairs = [(own[seed], preset[seed]) for seed in sorted(own.keys() & preset.keys())]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            cells += [
                mean_and_interval(list(own.values())),
                "" if switch == PRESET else mean_and_interval(differences),
            ]
        lines.append(f"{switch:<50}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def best(runs: Sequence[Run], switches: Sequence[str]) -> str:
    """Return the switch with the highest mean of `training` and `seen` over the seeds.

    Raise `ValueError` if a run lacks one of them.
    """

    def score(switch: str) -> float:
        own = [run for run in runs if run["arm"] == switch]
        values = [GRPO_METRICS[name](run, "room") for name in RULE for run in own]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            raise ValueError(f"a run of {switch!r} lacks {' or '.join(RULE)}")
        return fmean(known)

    return max(switches, key=score)


def main() -> None:
    parser = sweep_parser(__doc__)
    parser.add_argument("--grpo", action="store_true", help="train the actor alone")
    parser.add_argument("--switches", nargs="+", choices=[*SWITCHES, *GRPO_SWITCHES])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    if arguments.one:
        setting, switch, seed = arguments.one
        known, _ = SETTINGS[setting]
        run_and_print(Arm(known[switch]), ("room",), int(seed), arguments)
        return
    setting = GRPO if arguments.grpo else ROOM
    known, metrics = SETTINGS[setting]
    switches = list(dict.fromkeys((PRESET, *(arguments.switches or known))))
    if unknown := [switch for switch in switches if switch not in known]:
        parser.error(f"--switches: {', '.join(unknown)}: not a switch of {setting}")
    runs = run_missing(
        __file__,
        [(setting, switch, seed) for seed in arguments.seeds for switch in switches],
        arguments,
    )
    print(table(runs, switches, metrics))
    if arguments.grpo:
        print(f"best by the mean of {' and '.join(RULE)}: {best(runs, switches)}")
    write_results(arguments.out, {"switches": known, "runs": runs})


if __name__ == "__main__":
    main()
