"""Trained models and banks of a run as directories for other programs, with a card each."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from crl.config.command import changes_since
from crl.config.load import SavedRun
from crl.config.models import bundled_models, find_model, is_adapter
from crl.errors import ConfigError
from crl.evaluation.evaluate import Evaluation
from crl.evaluation.records import read_evaluation
from crl.learners.optimizer_file import OPTIMIZER_FILE
from crl.manager import ExperienceManager
from crl.manager.storage.database import copy_database
from crl.manager.storage.store import Store
from crl.modeling.adapters import (
    base_has_moved,
    moved_base,
    recorded_precision,
    write_base_name,
)
from crl.modeling.gguf import converted
from crl.monitor.run_dir import RunDir
from crl.run.bank import require_bank
from crl.run.checkpoint import MANIFEST, read_manifest, read_state
from crl.run.models import print_to_stderr
from crl.wording import counted

CARD = "README.md"
"""File name of a card, as on Hugging Face."""

BUNDLED_LICENCE = "apache-2.0"
"""Licence of the bundled models, which is that of this package."""

_LICENCE = re.compile(r"^license:\s*([\w.+-]+)\s*$", re.MULTILINE)


def export_model(
    saved: SavedRun, checkpoint: Path, role: str, target: Path, *, merge: bool = False
) -> None:
    """Write a trained model to the new directory `target`, in Hugging Face format with a card.

    `merge`: merge the adapter of the checkpoint into its base model.

    Raise `ConfigError` if the checkpoint has no model of this role or no adapter to merge, if
    `target` is not empty, or if the run deletes the checkpoint meanwhile.
    """
    with _new_directory(target, checkpoint):
        source = checkpoint / role
        if not source.is_dir():
            trained = read_manifest(checkpoint)["models"]
            reason = f"{checkpoint} has no {role}, because the run did not train one"
            remedy = f"Export the {trained[0]}" if trained else "Export the bank with --bank"
            raise ConfigError("role", role, reason, remedy)
        if merge and not is_adapter(source):
            reason = f"the {role} has no adapter, because all of its weights were trained"
            raise ConfigError("merge", True, reason, "Leave it out")
        initial: str = getattr(saved.config, role).model
        if merge:
            from crl.modeling.lora import write_merged

            base = converted(moved_base(source, initial, f"{role}.model"), "merge", print_to_stderr)
            write_merged(source, base, target, "merge")
        else:
            _copy_model(source, target, initial, f"{role}.model")
        (target / CARD).write_text(_model_card(saved, checkpoint, role, target), "utf-8")


def _copy_model(source: Path, target: Path, initial: str, key: str) -> None:
    """Copy a model of a checkpoint without its optimizer.

    `initial` is the model of the role in the settings of the run. An adapter names it if its base
    model has moved there.
    """
    ignored = shutil.ignore_patterns(OPTIMIZER_FILE)
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    if is_adapter(target) and base_has_moved(target, key):
        with suppress(ConfigError):  # an adapter can be exported without its base model
            write_base_name(target, moved_base(target, initial, key))


async def export_bank(saved: SavedRun, run: RunDir, checkpoint: Path, target: Path) -> None:
    """Write the bank at a checkpoint to the new directory `target`, with a card.

    The copy starts a new run (`bank.init`): it has neither the queue nor pending rewards. Raise
    `ConfigError` if the run has no bank, if `target` is not empty, or if the run deletes the
    checkpoint meanwhile, and `StoreError` if the copy fails.
    """
    if not saved.config.with_bank:
        reason = f"the method {saved.config.spec.name} of the run has no bank"
        raise ConfigError("run", str(run.path), reason, "Leave out --bank to export the actor")
    require_bank(run)
    with _new_directory(target, checkpoint):
        whole = target / "whole.sqlite"
        await copy_database(run.bank, whole)
        store = await Store.open(whole)
        try:
            archive = (await store.rollback(read_state(checkpoint)["bank"])).archive
            entries = len(await store.entries())
        finally:
            await store.aclose()
        await ExperienceManager.start_from(whole, target / run.bank.name)
        for path in (whole, *([archive] if archive else [])):
            path.unlink()
        (target / CARD).write_text(_bank_card(saved, checkpoint, entries), "utf-8")


@contextmanager
def _new_directory(target: Path, checkpoint: Path) -> Iterator[None]:
    """Create the directory `target` for an export. After an error, remove what was created.

    Raise `ConfigError` if `target` exists and is not empty, or if `checkpoint` has been deleted at
    the end of the context.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        reason = "exists and is not an empty directory"
        raise ConfigError("DIR", str(target), reason, "Choose another directory")
    created = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _complete(checkpoint):
            yield
    except BaseException:
        RunDir(target).clear()
        for path in created:
            path.rmdir()
        raise


@contextmanager
def _complete(checkpoint: Path) -> Iterator[None]:
    """Raise `ConfigError` if the run deletes `checkpoint` inside the context.

    The manifest is deleted first. While it exists, all other files exist.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not (checkpoint / MANIFEST).is_file():
        reason = "was deleted by the run while it was being copied"
        remedy = "Export again: the last checkpoint is kept, and so are those of run.keep_every"
        raise ConfigError("checkpoint", str(checkpoint), reason, remedy) from error
    if error:
        raise error


# ── cards ─────────────────────────────────────────────────────────────────────────────────────────


def _model_card(saved: SavedRun, checkpoint: Path, role: str, target: Path) -> str:
    base = saved.config.actor.model if role == "actor" else saved.config.extractor.model
    what = "adapter (LoRA)" if is_adapter(target) else "model"
    lines = [
        *_front_matter(base),
        f"# {role.capitalize()} trained with crl",
        "",
        f"This {what} was trained from `{_base_name(base)}` by reinforcement learning in text "
        "environments. Licence of the base model: "
        f"{_licence(base) or 'unknown, see its own card'}.",
        "",
        *_training_lines(saved, checkpoint),
        f"- precision: {_precision(target)}",
        "",
        *_result_lines(checkpoint),
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("DIR")',
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        "```",
        "",
        *(
            (
                "This needs the packages transformers and peft, and the base model in the place "
                "that adapter_config.json names. `crl export --merge` exports a model without "
                "these needs.",
                "",
                f"In a run of crl: `--set {role}.model=DIR`.",
            )
            if is_adapter(target)
            else (f"With vLLM: `vllm serve DIR`. In a run of crl: `--set {role}.model=DIR`.",)
        ),
    ]
    return "\n".join(lines) + "\n"


def _precision(model: Path) -> str:
    """Return the precision of the weights in the directory of a model, as text."""
    if is_adapter(model):
        return f"float32 (adapter), {recorded_precision(model) or 'unknown'} (base model)"
    return json.loads((model / "config.json").read_text("utf-8")).get("dtype") or "unknown"


def _bank_card(saved: SavedRun, checkpoint: Path, entries: int) -> str:
    lines = [
        "# Experience bank of a run of crl",
        "",
        f"`bank.sqlite` has {counted(entries, 'active experience')}, distilled from episodes by "
        f"`{_base_name(saved.config.extractor.model)}`. Their vectors are from the embedder "
        f"`{saved.config.embedder.model}`.",
        "",
        *_training_lines(saved, checkpoint),
        "",
        *_result_lines(checkpoint),
        "",
        "## Use",
        "",
        "`crl bank ls DIR/bank.sqlite` lists the experiences. A run starts from the bank with "
        "`--set bank.init=DIR/bank.sqlite`.",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(base: str) -> Iterator[str]:
    """Yield the metadata that Hugging Face reads from a model card."""
    yield "---"
    if licence := _licence(base):
        yield f"license: {licence}"
    if name := _hub_name(base):
        yield f"base_model: {name}"
    yield from ("library_name: transformers", "pipeline_tag: text-generation", "tags:")
    yield from ("- reinforcement-learning", "- crl", "---", "")


def _training_lines(saved: SavedRun, checkpoint: Path) -> Sequence[str]:
    config = saved.config
    command = saved.command or "unknown"
    versions = ", ".join(f"{name} {version}" for name, version in saved.versions.items() if version)
    return [
        "## Training",
        "",
        f"- method: {config.spec.name}",
        f"- tasks: {', '.join(config.tasks)}",
        f"- steps: {checkpoint.name}, of {config.rollout.groups} groups of "
        f"{config.rollout.group_size} episodes",
        f"- seed: {config.run.seed}",
        f"- command: `{command}`",
        *_change_lines(saved, checkpoint),
        f"- versions: {versions}",
    ]


def _change_lines(saved: SavedRun, checkpoint: Path) -> Iterator[str]:
    """Yield how the run differs from its command: its forks and the changed settings."""
    for fork in saved.lineage:
        yield f"- forked from: `{Path(str(fork['run'])).name}` at step {fork['step']}"
    changes = changes_since(saved.command, saved.config)
    if changes is None:
        config = f"{checkpoint.parent.parent.name}/config.json"
        yield f"- settings: those of `{config}`; they could not be compared with the command"
    elif changes:
        yield "- settings changed after the command:"
        yield from (f"  - `{change}`" for change in changes)


def _result_lines(checkpoint: Path) -> list[str]:
    """Return the last evaluation at or before the checkpoint, as a table."""
    records = dict(read_state(checkpoint)["measurements"]["evaluations"])
    lines = ["## Results", ""]
    if not records:
        return [*lines, "The run was not evaluated before this checkpoint."]
    step = max(records)
    evaluation: Evaluation = read_evaluation(records[step])
    lines += [
        f"Success after {counted(step, 'step')}, with its 95 % interval:",
        "",
        "| task | split | condition | episodes | success |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {task} | {split} | {condition} | {rate.episodes} | {rate} |"
        for (task, split, condition), rate in evaluation.rates.items()
    ]


def _base_name(model: str) -> str:
    """Return the name of a base model without the folders of this machine."""
    path = Path(model)
    return _hub_name(model) or (path.name if path.is_absolute() else model)


def _hub_name(model: str) -> str:
    """Return the name on Hugging Face of a model in its cache, or "" for another model."""
    parts = [part for part in Path(model).parts if part.startswith("models--")]
    return parts[-1].removeprefix("models--").replace("--", "/") if parts else ""


def _licence(model: str) -> str:
    """Return the licence that a model's own card names, or "" if none is known.

    The model may have been deleted since the run.
    """
    if model in bundled_models():
        return BUNDLED_LICENCE
    try:
        folder = find_model(model)
    except ConfigError:
        return ""
    card = folder / CARD if folder and folder.is_dir() else None
    if card is None or not card.is_file():
        return ""
    found = _LICENCE.search(card.read_text("utf-8", errors="replace"))
    return found.group(1) if found else ""
