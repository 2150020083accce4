"""Command behind `crl eval` with options: open the model, play, save the results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from crl.config.load import versions
from crl.evaluation.samples import SavedEpisode, Source, play_samples
from crl.evaluation.saved import SavedEvaluation, require_writable, save
from crl.planning import preflight
from crl.planning.tasks import data_notes, specs
from crl.prompts import hashes
from crl.run.assemble import open_evaluator
from crl.run.bank import BankSource
from crl.run.evaluating.request import Request
from crl.run.models import actor_model, extractor_model
from crl.run.supervision.interruptible import run_evaluation

SECTIONS = (
    "actor", "ask", "bank", "critic", "embedder", "engine", "eval", "prompts", "retrieval", "tasks",
)  # fmt: skip
"""Sections of the config that results depend on."""


def evaluate(request: Request, folder: Path) -> Path:
    """Play the evaluation, save it in `folder` and return the path of the JSON file.

    Raise `CrlError` if it cannot start or fails.
    """
    preflight.require(request.config, checks=preflight.EVALUATION_CHECKS)
    prompts = hashes(request.config.prompts.files)  # files may change while episodes are played
    existed = folder.exists()
    require_writable(folder)
    try:
        episodes = run_evaluation(_play(request), f"the evaluation of {request.subject}")
    except BaseException:
        if not existed:
            with suppress(OSError):
                folder.rmdir()  # unless it has files
        raise
    return save(SavedEvaluation(_about(request, prompts), episodes), folder, request.name)


async def _play(request: Request) -> list[SavedEpisode]:
    config, state = request.config, request.state
    async with open_evaluator(
        config, actor_model(config), _bank_source(request), state.get("success_rates")
    ) as evaluator:
        return await play_samples(evaluator, request.source, request.samples)


def _bank_source(request: Request) -> BankSource | None:
    if request.bank is None:
        return None
    asked = request.source is Source.online or request.config.ask.enabled
    writes = asked and request.config.with_extractor
    extractor = extractor_model(request.config) if writes else None
    bank = request.bank
    return BankSource(bank.path, extractor, request.step or 0, bank.snapshot, bank.foreign)


def _about(request: Request, prompts: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the model, the options and the settings of an evaluation, as JSON.

    `prompts`: SHA-256 of each prompt, by name.
    """
    config, bank = request.config, request.bank
    settings = config.model_dump(mode="json", include=set(SECTIONS))
    if request.checkpoint and (actor := request.checkpoint / "actor").is_dir():
        # The model may be a temporary copy of the checkpoint's adapter.
        settings["actor"]["model"] = str(actor.resolve())
    return {
        "subject": str(request.subject),
        "model": settings["actor"]["model"],
        "step": request.step,
        "weights": request.weights,
        "experience": request.source.value,
        "bank": bank and {"path": bank.path and str(bank.path), "snapshot": bank.snapshot},
        "samples": request.samples,
        "temperature": config.eval.temperature,
        "seed": config.run.seed,
        "deterministic": config.run.deterministic,
        "options": request.options.given,
        "settings": settings,
        "prompts": dict(prompts),
        "data_notes": data_notes(specs(config)),
        "versions": versions(),
        "time": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    }
