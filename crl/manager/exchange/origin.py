"""Origin of the experiences of an export, and the measurement of their evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import crl
from crl.config.load import load_saved
from crl.config.models.naming import public_name
from crl.manager.exchange.escapes import markdown, visible_line
from crl.wording import counted

MEASUREMENT = (
    "Evidence was measured in the episodes of training. Lift is success with the experience minus "
    "success without any, in the same groups of episodes, with its 95 % interval in brackets; an "
    "interval that contains 0 shows no effect. Credit is the number of won minus the number of "
    "lost guided episodes. Goals and their experiences are sorted by evidence, the best first."
)
"""Description of the measurement of the evidence."""

CAUTION = (
    "The experiences are output of a model. They are hints for the named tasks and may be wrong. "
    "They are not instructions from a person."
)
"""Advice on the use of the experiences."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of exported experiences. Empty texts are unknown."""

    bank: str
    """Name of the run's directory, or of the bank's file if it is in no run."""
    step: int | None
    """Completed actor steps at the last operation of the bank; None if unknown."""
    method: str = ""
    actor: str = ""
    """Name of the actor's initial model."""
    extractor: str = ""
    """Name of the extractor's initial model."""
    crl: str = ""
    """Version of crl that made the run."""

    @property
    def kind(self) -> str:
        """Kind of the origin."""
        return "run" if self.method else "bank"

    def fields(self, experiences: int) -> dict[str, str]:
        """Return the origin as front matter. `experiences`: number of exported experiences."""
        known = {
            self.kind: self.bank,
            "step": "" if self.step is None else str(self.step),
            "method": self.method,
            "actor": self.actor,
            "extractor": self.extractor,
            "crl-version": self.crl,
            "exported-by": f"crl {crl.__version__}",
            "experiences": str(experiences),
        }
        return {name: visible_line(value) for name, value in known.items() if value}

    def lines(self, different: int, entries: int, tried: int) -> Iterator[str]:
        """Yield paragraphs on the origin, in Markdown.

        `different`: number of exported experiences with different goals or texts. `entries`,
        `tried`: number of exported entries, and of those that guided an episode.
        """
        models = [
            f"{role} {markdown(visible_line(name))}"
            for role, name in (("actor", self.actor), ("extractor", self.extractor))
            if name
        ]
        step = "" if self.step is None else f" after {counted(self.step, 'step')}"
        details = ", ".join(
            [*([f"method {markdown(self.method)}"] if self.method else []), *models]
        )
        name = markdown(visible_line(self.bank))
        yield (
            f"{experiences_text(different, entries)} of the {self.kind} **{name}**"
            f"{step}{f' ({details})' if details else ''}; {tried:,} of "
            f"{'them' if different == entries else 'the entries'} guided an episode."
        )
        yield from ("", MEASUREMENT, "", CAUTION)


def experiences_text(different: int, entries: int) -> str:
    """Return the number of experiences in words. Entries with equal goals and texts are one."""
    if different == entries:
        return counted(entries, "experience")
    return f"{counted(different, 'different experience')} ({counted(entries, 'entry', 'entries')})"


def origin_of(bank: Path, step: int | None) -> Origin:
    """Return the origin of the bank at `bank`, from the config.json beside it if there is one.

    `step`: completed actor steps at the last operation of the bank.
    """
    path = bank.resolve()
    if not (path.parent / "config.json").is_file():
        return Origin(bank=path.name, step=step)
    saved = load_saved(path.parent)
    config = saved.config
    return Origin(
        bank=path.parent.name,
        step=step,
        method=config.spec.name,
        actor=public_name(config.actor.model),
        extractor=public_name(config.extractor.model) if config.with_extractor else "",
        crl=saved.versions.get("crl") or "",
    )
