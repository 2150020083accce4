"""What a run says when it ends: what changed, what it took, where the result is and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crl.run.evaluate import EvalSet, Evaluation, Rate


def success_lines(temperature: float, before: Evaluation, after: Evaluation | None = None) -> list[str]:
    """The success rates of an evaluation, or of two with their difference."""
    mode = f"sampled at temperature {temperature:g}" if temperature else "greedy"
    lines = [f"success on fixed eval sets, {mode}, without experience, [95 % Wilson interval over episodes]:"]
    lines += [_row(key, rate, after.rates if after else None) for key, rate in before.rates.items()]
    if errors := before.errors + (after.errors if after else 0):
        lines.append(f"  {errors} eval episodes could not be played and count as failures")
    return lines


def _row(key: EvalSet, before: Rate, after: Mapping[EvalSet, Rate] | None) -> str:
    task, split = key
    row = f"  {task} {split:<6} {before.episodes:>4} episodes   {before}"
    if after is None:
        return row
    return f"{row} → {after[key]}   {after[key].value - before.value:+.3f}"


@dataclass(frozen=True)
class Summary:
    """before, after: evaluations, None where the run was stopped earlier; seconds: wall time of the whole run;
    command: the command line that repeats the run, but for its seed and directory."""

    run: Path
    checkpoint: Path
    command: str
    seed: int
    steps: int
    seconds: float
    temperature: float
    before: Evaluation | None
    after: Evaluation | None
    skipped_updates: int

    def text(self) -> str:
        lines = ["", f"{self.steps} steps in {self.seconds:.0f} s", ""]
        lines += success_lines(self.temperature, self.before, self.after) if self.before else ["stopped before the first evaluation"]
        if self.skipped_updates:
            lines.append(f"  {self.skipped_updates} updates were skipped because the loss or its gradient was not finite")
        return "\n".join([*lines, "", *self._next()])

    def _next(self) -> list[str]:
        actor = self.checkpoint / "actor"
        return [
            f"the trained actor, in Hugging Face format: {actor}",
            f"  repeat the eval:   crl eval {self.run}",
            f"  train it further:  {self.command} --set actor.model={actor}",
            f"  another seed:      {self.command} --seed {self.seed + 1}",
            f"  in Python:         AutoModelForCausalLM.from_pretrained({str(actor)!r})",
            f"  every figure and every episode: {self.run / 'metrics.jsonl'}, {self.run / 'trajectories.jsonl'}",
        ]
