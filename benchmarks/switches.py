"""What does each switch do to listening, to the extractor's lessons and to success? In the room, on seeds for tuning.

    python benchmarks/switches.py --jobs 2 --out benchmarks/results/switches.json

A row is the preset with some other settings, `crl train --tasks room` with it, over seeds 0 to 2. `online`,
`alone`, `seen`, `lessons` and `advice` are the metrics of `main_command.py`; `updates` counts the extractor's.
Rows are compared with the preset's, paired by seed: mean ± half the 95 % interval by Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arms import Arm, Run, run_here, run_missing, sweep_parser
from common import mean_and_interval, write_results
from main_command import METRICS

PRESET = "the preset"
SEEDS = (0, 1, 2)
SHOWN = {name: METRICS[name] for name in ("online", "alone", "seen", "lessons", "advice")} | {
    "updates": lambda run, _task: run["extractor updates"]
}

EQUATION_6 = (
    "retrieval.choice=diverse",
    "retrieval.per=group",
    "retrieval.trials=0.0",
    "bank.cap=1000000",
    "bank.evict=fifo",
)
"""Eq. 6 in a bank that is never full, among lessons as similar as the preset asks."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    PRESET: (),
    "eq. 5 alone": ("complementary.listening=0.0",),
    "listening 2": ("complementary.listening=2.0",),
    "advantages across the group": ("complementary.advantages=cross",),
    "KL of the actor to its start 0.1": ("actor.kl_coef=0.1",),
    "self-distillation 0.5": ("complementary.self_distillation=0.5",),
    "record in the prompt": ("complementary.show_record=true",),
    "actor's learning rate halved": ("actor.optimizer.learning_rate=1e-4",),
    "no warm-up of the actor": ("actor.optimizer.warmup_steps=0",),
    "eq. 6, one search for a group": EQUATION_6,
    "eq. 6, one search for a group, eq. 5 alone": (*EQUATION_6, "complementary.listening=0.0"),
    "no trials": ("retrieval.trials=0.0",),
    "4 lessons a place": ("bank.cap=4",),
    "16 lessons a place": ("bank.cap=16",),
    "guided share 0.25": ("complementary.guided=0.25",),
    "guided share 0.75": ("complementary.guided=0.75",),
    "extractor's batch 16": ("extractor.batch=16",),
    "extractor's baseline its batch": ("extractor.baseline=batch",),
}
"""By what is changed: the settings."""


def table(runs: Sequence[Run], switches: Sequence[str]) -> str:
    """Render a row for each switch: its metrics over seeds, and their differences to the preset's in the same seeds."""
    lines = [f"{'':<50}" + "".join(f"{name:>18}{'− preset':>18}" for name in SHOWN)]
    for switch in switches:
        cells = []
        for metric in SHOWN.values():
            own, preset = ({run["seed"]: metric(run, "room") for run in runs if run["arm"] == arm} for arm in (switch, PRESET))
            pairs = [(own[seed], preset[seed]) for seed in sorted(own.keys() & preset.keys())]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            cells += [mean_and_interval(list(own.values())), "" if switch == PRESET else mean_and_interval(differences)]
        lines.append(f"{switch:<50}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = sweep_parser(__doc__)
    parser.add_argument("--switches", nargs="+", choices=list(SWITCHES), default=list(SWITCHES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    if arguments.one:
        _, switch, seed = arguments.one
        run_here(Arm(SWITCHES[switch]), ("room",), int(seed), arguments)
        return
    switches = list(dict.fromkeys((PRESET, *arguments.switches)))
    runs = run_missing(__file__, [("room", switch, seed) for seed in arguments.seeds for switch in switches], arguments)
    print(table(runs, switches))
    write_results(arguments.out, {"switches": SWITCHES, "runs": runs})


if __name__ == "__main__":
    main()
