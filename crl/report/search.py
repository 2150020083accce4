"""Search of a bank by meaning: cosine similarities of a text and the keys of entries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crl.config.load import load_saved
from crl.config.schema import EmbedderSection
from crl.embedders import embedder_named
from crl.errors import ConfigError
from crl.manager.inspection.reading import EntryView, KeyVectors
from crl.protocols import Embedder


def embedder_of(file: Path, keys: KeyVectors) -> EmbedderSection:
    """Return the embedder of the run, or of the bank if there is no config.json beside it."""
    return (
        load_saved(file.parent).config.embedder
        if (file.parent / "config.json").is_file()
        else embedder_named(keys.name)
    )


async def similarities(
    text: str, entries: Sequence[EntryView], keys: KeyVectors, embedder: Embedder
) -> list[float]:
    """Return the cosine similarity of the query and the key of each entry.

    If the bank has no vectors yet, the entries' texts are embedded and compared. Raise
    `ConfigError` if the bank's vectors were made by another embedder.
    """
    if keys.name is None:
        vectors = list(await embedder.embed([entry.text for entry in entries]))
    elif keys.comparable(embedder.name, embedder.dim):
        vectors = [keys.vectors[entry.uid] for entry in entries]
    else:
        reason = (
            "the vectors of the bank cannot be compared with those of the search's embedder, "
            f"{embedder.name}"
        )
        raise ConfigError(
            "embedder",
            keys.name,
            reason,
            "Put the config.json of the run that computed the vectors beside the bank",
        )
    (query,) = await embedder.embed([text])
    return [float(vector @ query) for vector in vectors]
