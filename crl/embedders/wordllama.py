"""Embedder of static word vectors: WordLlama, which needs no transformer and no download."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import as_file, files

import numpy as np
from numpy.typing import NDArray

WEIGHTS = "weights/l2_supercat_256.safetensors"
TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"


class WordLlamaEmbedder:
    """`crl.protocols.Embedder` of the means of token vectors, by the package wordllama.

    The vectors are part of the package. They compare the meaning of words, but not their order.
    """

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
        from wordllama.inference import WordLlamaInference

        package = files("wordllama")
        # `WordLlama.load` looks for the tokenizer in a folder that the package does not have.
        with as_file(package / WEIGHTS) as weights, as_file(package / TOKENIZER) as tokenizer:
            (vectors,) = load_file(weights).values()
            self._model = WordLlamaInference(vectors, Tokenizer.from_file(str(tokenizer)))
        self.name, self.dim = f"wordllama-{version('wordllama')}", vectors.shape[1]

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings: float32 [len(texts), dim], unit norm.

        All texts without any token have the same arbitrary vector.
        """
        # One by one, because padding in a batch changes the last bits.
        rows = [np.asarray(self._model.embed([text]), np.float32)[0] for text in texts]
        vectors = np.stack(rows) if rows else np.zeros((0, self.dim), np.float32)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
