"""Names of models for readers on other machines."""

from __future__ import annotations

from pathlib import Path


def public_name(model: str) -> str:
    """Return the name of a model without the folders of this machine."""
    path = Path(model)
    return hub_name(model) or (path.name if path.is_absolute() else model)


def hub_name(model: str) -> str:
    """Return the name on Hugging Face of a model in its cache, or "" for another model."""
    parts = [part for part in Path(model).parts if part.startswith("models--")]
    return parts[-1].removeprefix("models--").replace("--", "/") if parts else ""
