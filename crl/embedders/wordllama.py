"""Embedder of static word vectors: those of WordLlama, which needs no transformer."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crl.embedders.parts import embed_in_parts

PACKAGE = "wordllama"
WEIGHTS = "weights/l2_supercat_256.safetensors"
TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"


def wordllama_name() -> str:
    """Return the name of the embedder, which is that of the installed package.

    Raise `PackageNotFoundError` if the package is not installed.
    """
    return f"{PACKAGE}-{version(PACKAGE)}"


class WordLlamaEmbedder:
    """`crl.protocols.Embedder` of the means of token vectors, from files of the package wordllama.

    It compares the meaning of words, but not their order. The package is not imported: its import
    configures the logging of the whole process, and its loader may download files. The vectors are
    those of `WordLlamaInference.embed` of one text.
    """

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        spec = find_spec(PACKAGE)
        assert spec
        assert spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0])
        (vectors,) = load_file(folder / WEIGHTS).values()
        self._vectors = vectors.astype(np.float32)
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name, self.dim = wordllama_name(), self._vectors.shape[1]

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings: float32 [len(texts), dim], unit norm.

        All texts without any token have the same arbitrary vector.
        """
        return await embed_in_parts(texts, self.dim, self._embed)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            if ids := self._tokenizer.encode(text, add_special_tokens=False).ids:
                vector[:] = self._vectors[ids].sum(0) / len(ids)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
