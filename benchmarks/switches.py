"""Effect of each switch on listening, on the extractor's lessons and on success, in the room.

    python benchmarks/switches.py --jobs 2 --out benchmarks/results/switches.json

Each row is `crl train --tasks room` with the preset and some other settings. Seeds 0 to 2 are seeds
for tuning. `online`, `alone`, `seen`, `lessons` and `advice` are the metrics of `main_command.py`.
`updates` is the number of updates of the extractor. Rows are compared with the preset, paired by
seed: mean ± half the 95 % interval by Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arms import Arm, Run, run_and_print, run_missing, sweep_parser
from common import mean_and_interval, write_results
from main_command import METRICS

PRESET = "the preset"
SEEDS = (0, 1, 2)
TABLE_METRICS = {
    name: METRICS[name] for name in ("online", "alone", "seen", "lessons", "advice")
} | {"updates": lambda run, _task: run["extractor updates"]}

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


def table(runs: Sequence[Run], switches: Sequence[str]) -> str:
    """Return a table with one row per switch.

    A row holds the metrics over seeds and their differences from the preset in the same seeds.
    """
    lines = [f"{'':<50}" + "".join(f"{name:>18}{'− preset':>18}" for name in TABLE_METRICS)]
    for switch in switches:
        cells = []
        for metric in TABLE_METRICS.values():
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


def main() -> None:
    parser = sweep_parser(__doc__)
    parser.add_argument("--switches", nargs="+", choices=list(SWITCHES), default=list(SWITCHES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    if arguments.one:
        _, switch, seed = arguments.one
        run_and_print(Arm(SWITCHES[switch]), ("room",), int(seed), arguments)
        return
    switches = list(dict.fromkeys((PRESET, *arguments.switches)))
    runs = run_missing(
        __file__,
        [("room", switch, seed) for seed in arguments.seeds for switch in switches],
        arguments,
    )
    print(table(runs, switches))
    write_results(arguments.out, {"switches": SWITCHES, "runs": runs})


if __name__ == "__main__":
    main()
