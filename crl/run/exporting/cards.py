"""Cards of exported models and banks: README.md with metadata, as on Hugging Face."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import DatasetCardData, ModelCardData

from crl.config.command import changes_since
from crl.config.load import SavedRun
from crl.config.models import base_name, bundled_models, find_model, is_adapter, is_gguf
from crl.config.models.naming import hub_name, public_name
from crl.errors import ConfigError
from crl.evaluation.evaluate import CONDITION_LABELS, Evaluation
from crl.evaluation.records import read_evaluation
from crl.modeling.adapters import recorded_precision
from crl.run.checkpoint import read_state
from crl.wording import counted

CARD = "README.md"
"""File name of a card, as on Hugging Face."""

BUNDLED_LICENCE = "apache-2.0"
"""Licence of the bundled models, which is that of this package."""

_LICENCE = re.compile(r"^license:\s*([\w.+-]+)\s*$", re.MULTILINE)


def model_card(saved: SavedRun, checkpoint: Path, role: str, target: Path) -> str:
    """Return the card of the model of a role that was exported to `target`."""
    base = saved.config.actor.model if role == "actor" else saved.config.extractor.model
    what = "adapter (LoRA)" if is_adapter(target) else "model"
    lines = [
        *_front_matter(role, base, adapter=is_adapter(target)),
        f"# {role.capitalize()} trained with crl",
        "",
        f"This {what} was trained from `{public_name(base)}` by reinforcement learning in text "
        "environments. Licence of the base model: "
        f"{_licence(base) or 'unknown, see its own card'}.",
        "",
        *_training_lines(saved, checkpoint),
        f"- precision: {_precision(target)}",
        "",
        *_result_lines(checkpoint),
        "",
        *_limit_lines(saved, role),
        "",
        "## Use",
        "",
        *_use_lines(role, target),
    ]
    return "\n".join(lines) + "\n"


def _use_lines(role: str, target: Path) -> Iterator[str]:
    """Yield the lines that tell how other programs load the model in `target`."""
    code = (
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("DIR")',
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        "```",
        "",
    )
    if not is_adapter(target):
        yield from code
        yield f"With vLLM: `vllm serve DIR`. In a run of crl: `--set {role}.model=DIR`."
        return
    if (kind := _base_kind(target)) == "directory":
        yield from code
        yield (
            "This needs the packages transformers and peft, and the base model at the path in "
            "adapter_config.json. `crl export --merge` exports a model without these requirements."
        )
    else:
        yield (
            f"The base model at the path in adapter_config.json is {kind}, so other programs "
            "cannot load this adapter. `crl export --merge` exports a model that they can load."
        )
    yield ""
    yield f"In a run of crl: `--set {role}.model=DIR`."


def _base_kind(adapter: Path) -> str:
    """Return what the base model of an adapter is: "directory", or another kind with an article."""
    base = Path(base_name(adapter, "actor.model"))
    if is_gguf(base):
        return "a GGUF file"
    return "an adapter itself" if is_adapter(base) else "directory"


def _precision(model: Path) -> str:
    """Return the precision of the weights in the directory of a model, as text."""
    if is_adapter(model):
        return f"float32 (adapter), {recorded_precision(model) or 'unknown'} (base model)"
    return json.loads((model / "config.json").read_text("utf-8")).get("dtype") or "unknown"


def bank_card(saved: SavedRun, checkpoint: Path, entries: int) -> str:
    """Return the card of an exported bank with this number of active entries."""
    lines = [
        *_dataset_front_matter(saved, entries),
        "# Experience bank of a run of crl",
        "",
        f"`bank.sqlite` has {counted(entries, 'active experience')}, distilled from episodes by "
        f"`{public_name(saved.config.extractor.model)}`. Their vectors are from the embedder "
        f"`{saved.config.embedder.model}`.",
        "",
        *_training_lines(saved, checkpoint),
        "",
        *_result_lines(checkpoint),
        "",
        "## Limits",
        "",
        "The experiences are output of a model and were not checked by a person. They are "
        "meant for the tasks of the run, and for a model that was trained to read them. Their lift "
        "is measured with the actor of the run.",
        "",
        "## Use",
        "",
        "`crl bank ls DIR/bank.sqlite` lists the experiences. A run starts from the bank with "
        "`--set bank.init=DIR/bank.sqlite`.",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(role: str, base: str, *, adapter: bool) -> Iterator[str]:
    """Yield the metadata that Hugging Face reads from a model card.

    The licence is that of the base model. Licence and base model are left out if unknown.
    """
    metadata = ModelCardData(
        license=_licence(base) or None,
        base_model=hub_name(base) or None,
        base_model_relation="adapter" if adapter else "finetune",
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "llm-agent", "crl", role],
    )
    if not metadata.base_model:
        metadata.pop("base_model_relation")
    yield from ("---", metadata.to_yaml(), "---", "")


def _dataset_front_matter(saved: SavedRun, entries: int) -> Iterator[str]:
    """Yield the metadata that Hugging Face reads from a dataset card.

    Licence and language are left out, because they are unknown for texts that a model wrote about
    games.
    """
    metadata = DatasetCardData(
        tags=["reinforcement-learning", "llm-agent", "crl", "experience-bank", "sqlite"],
        size_categories=[_size_category(entries)],
        pretty_name=f"Experience bank of {', '.join(saved.config.tasks)}",
    )
    yield from ("---", metadata.to_yaml(), "---", "")


def _size_category(entries: int) -> str:
    """Return Hugging Face's category of a number of entries."""
    below = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
    return next((name for limit, name in below.items() if entries < limit), "1M<n<10M")


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
    """Yield the differences of the run from its command: its forks and the changed settings."""
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
        f"Success after {counted(step, 'step')}, with its 95 % interval. The split seen has "
        "training places, the split unseen has other places.",
        "",
        "| task | split | condition | episodes | success |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {task} | {split} | {CONDITION_LABELS[condition]} | {rate.episodes} | {rate} |"
        for (task, split, condition), rate in evaluation.rates.items()
    ]


def _limit_lines(saved: SavedRun, role: str) -> list[str]:
    """Return the intended use of a model and its limits."""
    config = saved.config
    tasks = ", ".join(config.tasks)
    if role == "actor":
        guided = (
            " It was trained with and without experiences in its prompt."
            if config.with_bank
            else ""
        )
        purpose = (
            f"The model acts as an agent in the tasks of the run ({tasks}), with the prompts and "
            f"the format of actions of crl.{guided}"
        )
        reward = "the success of its episodes"
    else:
        purpose = (
            f"The model reads episodes of the tasks of the run ({tasks}), in the prompts of crl, "
            "and answers with operations on a bank of experiences."
        )
        reward = "the success of the episodes that its experiences guided"
    return [
        "## Intended use and limits",
        "",
        f"{purpose} It is meant for research on such agents.",
        "",
        f"- It was rewarded for {reward}. Other tasks, other prompts and the abilities of the base "
        "model were not measured.",
        "- The results are those of one run. Their intervals do not contain the differences "
        "between seeds.",
        "- It was not trained to be safe or truthful.",
    ]


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
