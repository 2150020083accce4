"""Embedders for encoders in Hugging Face format.

BERT-like encoders and decoders such as Qwen3-Embedding are supported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from crl.embedders.recipe import MODEL_KEY, EncoderSettings, Pooling
from crl.errors import ConfigError, EngineError
from crl.modeling.loading import (
    OWN_FILES,
    checksum,
    first_line,
    named_weights,
    not_loadable,
    resolve_device,
    silence_transformers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class EncoderEmbedder:
    """`crl.protocols.Embedder` on one worker thread: pooled last hidden states with unit norm.

    `name` is derived from everything that determines the vectors: weights, tokenizer, settings and
    token limit. It does not depend on the location of the directory. A text longer than the model's
    limit is truncated.
    """

    def __init__(
        self, settings: EncoderSettings, device: str = "auto", *, batch: int = 32, threads: int = 1
    ) -> None:
        """Load the model of `settings` and embed one text to find the dimension.

        `batch`: texts per forward pass. `threads`: CPU threads. Raise `ConfigError` if the model
        cannot be loaded or cannot embed a text.
        """
        self._settings, self._batch = settings, batch
        self._model = _load(settings, resolve_device(device, "embedder.device"))
        self._tokenizer = encoder_tokenizer(settings)
        self._max_tokens = token_limit(settings, self._tokenizer, self._model.config)
        self._executor = ThreadPoolExecutor(
            1, "embedder", initializer=torch.set_num_threads, initargs=(threads,)
        )
        try:
            self.dim = self._executor.submit(self._forward, ["Go north?"]).result().shape[1]
        except Exception as error:  # models that do not accept plain text fail in many ways
            self.close()
            reason = f"the model cannot embed a text ({type(error).__name__}: {first_line(error)})"
            raise ConfigError(
                MODEL_KEY, str(settings.folder), reason, "Give a directory with a text encoder"
            ) from error
        self.name = f"{self._model.config.model_type}-{self._fingerprint():08x}-{self.dim}"

    def close(self) -> None:
        """Finish the current batch, drop queued ones and stop the thread."""
        self._executor.shutdown(cancel_futures=True)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of `texts`: float32 [len(texts), dim], unit norm.

        Raise `EngineError` if the computation fails.
        """
        vectors = np.zeros((len(texts), self.dim), np.float32)
        # Sorting by length minimises padding.
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(texts), self._batch):
            rows = by_length[start : start + self._batch]
            vectors[rows] = await self._compute([texts[i] for i in rows])
        return vectors

    async def _compute(self, texts: Sequence[str]) -> NDArray[np.float32]:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._forward, texts
            )
        except Exception as error:  # a device can fail in many ways
            raise EngineError(
                f"embedder {self._settings.folder}: {type(error).__name__}: {first_line(error)}"
            ) from error

    @torch.inference_mode()
    def _forward(self, texts: Sequence[str]) -> NDArray[np.float32]:
        tokens = self._tokenizer(
            self._settings.prepare(texts),
            padding=True,
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
        ).to(self._model.device)
        hidden = self._model(**tokens).last_hidden_state
        vectors = pool_states(hidden.float(), tokens["attention_mask"], self._settings.pooling)
        return torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()

    def _fingerprint(self) -> int:
        return self._settings.fingerprint(self._max_tokens, checksum(named_weights(self._model)))


def pool_states(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return one vector per text: [n, h], from the last hidden states [n, t, h].

    `mask`: [n, t], 1 on the tokens of the text; padding may be on either side. Pooling "mean" is
    the mean over the text's tokens, special tokens included; "cls" is the first token; "lasttoken"
    is the last token.
    """
    if pooling == "mean":
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    positions = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    token_index = mask.argmax(1) if pooling == "cls" else positions.argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), token_index]


def _load(settings: EncoderSettings, device: torch.device) -> PreTrainedModel:
    from transformers import AutoModel

    silence_transformers()
    folder = str(settings.folder)
    try:
        model, info = AutoModel.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            settings.folder, dtype="auto", output_loading_info=True, **OWN_FILES
        )
    except Exception as error:  # a broken file can fail in many ways
        remedy = "Give a directory with a text encoder"
        raise not_loadable(MODEL_KEY, settings.folder, error, remedy) from error
    # The output of the pooler is not used, so its weights may be missing.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        reason = f"its checkpoint lacks weights: {missing[0]} ({len(missing)} in total)"
        raise ConfigError(MODEL_KEY, folder, reason, "Download or create the encoder again")
    model.config.use_cache = False
    return model.to(device).eval()


def encoder_tokenizer(settings: EncoderSettings) -> Any:
    """Return the tokenizer of the encoder. It pads on the right.

    With right padding, positions in a causal model are those of the text alone. Raise `ConfigError`
    if the tokenizer cannot be loaded or cannot encode a text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.folder, **OWN_FILES)
    except Exception as error:
        remedy = "Put the tokenizer's files in this directory"
        raise not_loadable(
            MODEL_KEY, settings.folder, error, remedy, part="its tokenizer"
        ) from error
    # Without its files, transformers builds an empty tokenizer.
    if not tokenizer("Go north?")["input_ids"]:
        raise ConfigError(
            MODEL_KEY,
            str(settings.folder),
            "its tokenizer cannot encode a text",
            "Put the tokenizer's files in this directory",
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked, so the choice does not matter
    return tokenizer


def token_limit(settings: EncoderSettings, tokenizer: Any, config: PreTrainedConfig) -> int:
    """Return the maximal tokens of a text: the lowest limit of settings, tokenizer and model."""
    limits = (
        settings.max_tokens,
        tokenizer.model_max_length,
        getattr(config, "max_position_embeddings", None),
    )
    return min(limit for limit in limits if limit)
