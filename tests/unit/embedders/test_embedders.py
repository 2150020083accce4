"""Embedders: encoders in a directory, an endpoint over HTTP, and rejected settings.

Encoders are compared with a plain computation.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from crl.config.load import dump, load, load_saved
from crl.config.resume import resumed_config
from crl.config.schema import EmbedderSection, RetrievalSection
from crl.embedders import known_name, open_embedder, require_embedder
from crl.embedders.encoder import EncoderEmbedder, pool_states
from crl.embedders.endpoint import ATTEMPTS, EndpointEmbedder
from crl.embedders.hash import HashEmbedder
from crl.embedders.recipe import EncoderSettings, read_encoder_settings
from crl.errors import ConfigError, EngineError
from crl.manager import ManagerSettings
from crl.manager.storage.database import require_vectors_of
from crl.planning.plan import plan
from crl.planning.preflight import require
from crl.protocols import Monitor
from crl.run.progress import embedding_progress
from support.bank_commands import bank, copy_of, finished_run, parsed
from support.managers import WordEmbedder, add, answering, open_manager, request, search

TEXTS = [
    "Go west.",
    "Reach the stairs down (>) of the azure cellar, then wait.",
    "",
    "Follow the left wall.",
    "Go west.",
]


# ── word vectors ──────────────────────────────────────────────────────────────────────────────────

LANGUAGE_MODEL = "actor.profile=full"


async def test_word_vectors_compare_meaning_and_do_not_depend_on_the_batch() -> None:
    section = EmbedderSection(model="wordllama")
    require_embedder(section)
    texts = ["reach the stairs", "go to the staircase", "buy a red shirt", "", "reach the stairs"]
    async with open_embedder(section) as embedder:
        vectors = await embedder.embed(texts)
        alone = [await embedder.embed([text]) for text in texts]
        assert (await embedder.embed([])).shape == (0, embedder.dim)
    assert (vectors.shape, vectors.dtype) == ((5, 256), np.float32)
    assert np.array_equal(vectors, np.concatenate(alone))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert np.array_equal(vectors[3], np.eye(256, dtype=np.float32)[0]), "a text without tokens"
    assert embedder.name == "wordllama-0.4.0.post1"


def test_word_vectors_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    remedy = (
        r"Run pip install 'crl\[wordllama\]', or add --set embedder.model=hash, which compares "
        r"wording alone\."
    )
    for section in (
        EmbedderSection(model="wordllama"),
        load(["room"], sets=[LANGUAGE_MODEL]).embedder,
    ):
        with pytest.raises(ConfigError, match=remedy):
            require_embedder(section)
        with pytest.raises(ConfigError, match=remedy):
            known_name(section)


def test_word_vectors_are_those_of_the_package_which_is_not_imported():
    """Its import would print the log records of all packages."""
    code = """
import asyncio, logging, sys
import numpy as np
from crl.embedders.wordllama import WordLlamaEmbedder

embedder = WordLlamaEmbedder()
texts = ["Reach the stairs down (>).", "a\\nb", "Zoë said: go 3 steps. " * 40]
vectors = asyncio.run(embedder.embed(texts))
assert "wordllama" not in sys.modules
assert not logging.getLogger().handlers

from wordllama import WordLlama, WordLlamaInference

library = WordLlamaInference(embedder._vectors, embedder._tokenizer)
for text, vector in zip(texts, vectors):
    expected = library.embed([text])
    assert np.array_equal(vector[None], expected / np.linalg.norm(expected, axis=1, keepdims=True))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_hash_vectors_are_those_of_the_vectorizer_of_scikit_learn() -> None:
    from sklearn.feature_extraction.text import HashingVectorizer

    texts = ["Reach the stairs down (>).", "Zoë said: go 3 steps. " * 40, "a"]
    vectorizer: Any = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=384)
    vectors = await HashEmbedder().embed([*texts, " "])
    assert np.array_equal(vectors[:3], vectorizer.transform(texts).toarray().astype(np.float32))
    assert np.array_equal(vectors[3], np.eye(384, dtype=np.float32)[0]), "a text without n-grams"


@pytest.mark.parametrize("model", ["hash", "wordllama"])
async def test_long_texts_are_embedded_in_parts_between_which_other_tasks_run(model: str):
    texts = ["Go west. " * 60, "Go east.", "", "Go north. " * 300, *["Look."] * 300]
    turns = 0

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with open_embedder(EmbedderSection(model=model)) as embedder:
        alone = [await embedder.embed([text]) for text in texts]
        task = asyncio.create_task(other_task())
        vectors = await embedder.embed(texts)
        task.cancel()
    assert np.array_equal(vectors, np.concatenate(alone))
    assert turns == 3, "parts: 552 characters, 3,000, 1,000 and 500"


# ── the default ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("preset", "sets", "model"),
    [
        ("cpu", [], "hash"),
        ("cpu", ["embedder.model=auto"], "hash"),
        ("cpu", [LANGUAGE_MODEL], "wordllama"),
        ("cpu", [LANGUAGE_MODEL, "embedder.model=hash"], "hash"),
        ("cpu", ["embedder.model=wordllama"], "wordllama"),
        ("cpu", ["extractor.profile=full"], "hash"),
        ("gpu1", [], "wordllama"),
        ("gpu1", ["actor.model=tiny-actor"], "hash"),
        ("node8", [], "Qwen/Qwen3-Embedding-0.6B"),
    ],
)
def test_the_profile_of_the_actor_decides_about_the_embedder(
    preset: str, sets: list[str], model: str
):
    config = load(["room"], preset=preset, sets=sets)
    assert config.embedder.model == model
    assert f"embedder   {model}" in plan(config) or preset != "cpu"


def test_a_saved_run_keeps_its_embedder(tmp_path: Path):
    """Runs from before the default depended on the model used hash."""
    path = tmp_path / "config.json"
    for config in (
        load(["room"], sets=[LANGUAGE_MODEL]),
        load(["room"], sets=[LANGUAGE_MODEL, "embedder.model=hash"]),
    ):
        dump(config, path)
        assert load_saved(tmp_path).config == config
    saved = json.loads(path.read_text("utf-8"))
    del saved["config"]["embedder"]
    path.write_text(json.dumps(saved), "utf-8")
    old = load_saved(tmp_path).config
    assert (old.profile("actor"), old.embedder.model) == ("full", "hash")
    with pytest.raises(ConfigError, match="cannot change from 'hash' in a run that continues"):
        resumed_config(old, options={}, sets=["embedder.model=auto"], has_moved=lambda *_: False)


@pytest.mark.parametrize("model", ["hash", "wordllama"])
def test_bank_search_without_a_config_uses_the_word_embedder_of_the_bank(
    model: str, tmp_path: Path
):
    run = finished_run(tmp_path / "run")

    async def embed_again() -> None:
        async with open_embedder(EmbedderSection(model=model)) as embedder:
            assert known_name(EmbedderSection(model=model)) == embedder.name
            opened = await open_manager(run / "bank.sqlite", answering(str), embedder=embedder)
            await opened.aclose()

    asyncio.run(embed_again())
    rows = parsed("search", copy_of(run, tmp_path), "Mind the trap.")
    assert (rows[0]["text"], rows[0]["similarity"]) == ("Mind the trap.", pytest.approx(1.0))


def test_a_bank_of_another_embedder_is_not_read_by_an_evaluation(tmp_path: Path):
    bank_file = finished_run(tmp_path / "run") / "bank.sqlite"
    name = known_name(load(["room"], sets=[LANGUAGE_MODEL]).embedder)
    assert name
    with pytest.raises(ConfigError, match="made by the embedder hash-char_wb-2-4-384, not by word"):
        require_vectors_of(bank_file, name, "bank")


# ── directories ───────────────────────────────────────────────────────────────────────────────────


def sentence_transformer_directory(
    folder: Path, model: Path, pooling: Mapping[str, Any], **files: Any
) -> Path:
    """Copy `model` to `folder` in the format of sentence-transformers. Return the folder.

    `files` are further JSON files. Their names have no .json.
    """
    copytree(model, folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    for name, data in {"modules": modules, "1_Pooling/config": pooling, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(data), "utf-8")
    return folder


def hidden_states(path: Path, text: str, limit: int = 64) -> torch.Tensor:
    """Return the last hidden states [t, h] of one text, computed alone and without padding."""
    ids = AutoTokenizer.from_pretrained(path)(
        text or " ", truncation=True, max_length=limit, return_tensors="pt"
    )
    with torch.inference_mode():
        return AutoModel.from_pretrained(path).eval()(**ids).last_hidden_state[0]


def unit(vector: torch.Tensor) -> np.ndarray:
    return (vector / vector.norm()).numpy()


def encode(path: Path, *texts: str, **options: Any) -> np.ndarray:
    async def run() -> np.ndarray:
        encoder = EncoderEmbedder(read_encoder_settings(path), "cpu", **options)
        try:
            return await encoder.embed(texts)
        finally:
            encoder.close()

    return asyncio.run(run())


def name_of(settings: EncoderSettings) -> str:
    encoder = EncoderEmbedder(settings, "cpu")
    encoder.close()
    return encoder.name


@pytest.mark.parametrize("left", [False, True])
def test_pooling_by_hand(left: bool):
    hidden = torch.tensor(
        [[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]], [[4.0, 0.0], [6.0, 2.0], [8.0, 1.0]]]
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    if left:
        hidden[0], mask[0] = hidden[0].roll(1, 0), mask[0].roll(1, 0)
    assert pool_states(hidden, mask, "mean").tolist() == [[2.0, 4.0], [6.0, 1.0]]
    assert pool_states(hidden, mask, "cls").tolist() == [[1.0, 2.0], [4.0, 0.0]]
    assert pool_states(hidden, mask, "lasttoken").tolist() == [[3.0, 6.0], [8.0, 1.0]]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_the_default_is_mean_pooling_with_any_batch_size(random_bert: Path, batch: int):
    vectors = encode(random_bert, *TEXTS, batch=batch)
    assert (vectors.shape, vectors.dtype) == ((5, 32), np.float32)
    assert np.allclose(
        vectors, [unit(hidden_states(random_bert, text).mean(0)) for text in TEXTS], atol=1e-5
    )
    assert abs(vectors[0] @ vectors[1]) < 0.99


def test_embedding_no_texts(random_bert: Path):
    assert encode(random_bert).shape == (0, 32)


@pytest.mark.parametrize(
    ("pooling", "row"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 0),
        (
            {
                "pooling_mode_lasttoken": True,
                "pooling_mode_mean_tokens": False,
                "include_prompt": True,
            },
            -1,
        ),
        ({"pooling_mode": "cls"}, 0),
    ],
)
def test_pooling_is_read_from_sentence_transformers_files(
    random_bert: Path, tmp_path: Path, pooling: dict, row: int
):
    path = sentence_transformer_directory(tmp_path / "encoder", random_bert, pooling)
    assert np.allclose(
        encode(path, *TEXTS),
        [unit(hidden_states(random_bert, text)[row]) for text in TEXTS],
        atol=1e-5,
    )


def test_a_decoder_gives_its_last_token(random_qwen3: Path, tmp_path: Path):
    path = sentence_transformer_directory(
        tmp_path / "decoder", random_qwen3, {"pooling_mode_lasttoken": True}
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = "left"  # as in Qwen3-Embedding
    tokenizer.save_pretrained(path)
    assert np.allclose(
        encode(path, *TEXTS),
        [unit(hidden_states(random_qwen3, text, 4096)[-1]) for text in TEXTS],
        atol=1e-5,
    )


def test_default_prompt_lower_case_and_token_limit(random_bert: Path, tmp_path: Path):
    prompts = {
        "prompts": {"query": "Search: ", "document": "Text: "},
        "default_prompt_name": "document",
    }
    path = sentence_transformer_directory(
        tmp_path / "encoder", random_bert, {"pooling_mode_mean_tokens": True},
        config_sentence_transformers=prompts,
        sentence_bert_config={"max_seq_length": 9, "do_lower_case": True},
    )  # fmt: skip
    long = "Go WEST, then wait. " * 9
    assert np.allclose(
        encode(path, long)[0],
        unit(hidden_states(random_bert, f"text: {long.lower()}", 9).mean(0)),
        atol=1e-5,
    )
    prompts["default_prompt_name"] = None  # type: ignore[assignment]
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert np.allclose(
        encode(path, "Go WEST")[0],
        unit(hidden_states(random_bert, "go west", 9).mean(0)),
        atol=1e-5,
    )


def test_a_text_longer_than_the_models_limit_is_truncated(random_bert: Path):
    long = "north east south west " * 100
    assert np.allclose(
        encode(random_bert, long)[0], unit(hidden_states(random_bert, long).mean(0)), atol=1e-5
    )


def test_a_model_in_a_subfolder(random_bert: Path, tmp_path: Path):
    path = sentence_transformer_directory(
        tmp_path / "encoder", random_bert, {"pooling_mode_mean_tokens": True}
    )
    (path / "0_Transformer").mkdir()
    for file in random_bert.iterdir():
        (path / file.name).rename(path / "0_Transformer" / file.name)
    text = (path / "modules.json").read_text().replace('"path": ""', '"path": "0_Transformer"')
    (path / "modules.json").write_text(text)
    assert np.allclose(encode(path, "Go west."), encode(random_bert, "Go west."), atol=1e-6)


def test_the_name_depends_on_everything_that_determines_the_vectors(
    random_bert: Path, tmp_path: Path
):
    moved, other = (
        copytree(random_bert, tmp_path / "moved"),
        copytree(random_bert, tmp_path / "other"),
    )
    model = AutoModel.from_pretrained(random_bert)
    model.embeddings.word_embeddings.weight.data[7] += 0.1  # like a step of training
    model.save_pretrained(other)
    name = name_of(EncoderSettings(random_bert))
    assert name_of(EncoderSettings(moved)) == name
    assert name.startswith("bert-")
    assert name.endswith("-32")
    settings = (
        EncoderSettings(other),
        EncoderSettings(random_bert, "cls"),
        EncoderSettings(random_bert, prompt="a "),
        EncoderSettings(random_bert, lowercase=True),
    )
    assert len({name, *map(name_of, settings)}) == 5


async def test_an_encoder_computes_on_one_separate_thread(random_bert: Path):
    encoder, threads = EncoderEmbedder(EncoderSettings(random_bert), "cpu"), set()
    encoder._model.register_forward_hook(lambda *_: threads.add(threading.current_thread().name))
    await asyncio.gather(*(encoder.embed(TEXTS) for _ in range(4)))
    encoder.close()
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


async def test_a_failing_encoder_raises_an_engine_error(random_bert: Path):
    encoder = EncoderEmbedder(EncoderSettings(random_bert), "cpu")
    (
        encoder._model.get_input_embeddings()
        # With a table for a single token, every lookup of another token fails.
        .weight.data  # pyright: ignore[reportAttributeAccessIssue]
    ) = torch.zeros(1, 32)
    with pytest.raises(
        EngineError, match=f"embedder {random_bert}: IndexError: index out of range"
    ):
        await encoder.embed(["Go west."])
    encoder.close()


# ── an endpoint ───────────────────────────────────────────────────────────────────────────────────

Response = tuple[int, Any]
"""HTTP status and body. A body of bytes is sent unchanged, any other body as JSON."""


TRUNCATED = b"wait until"
"""Ending of a body whose Content-Length is larger than the body."""


class Endpoint:
    """HTTP server on this machine.

    `requests` holds the requests with their headers. `respond` returns the response to the n-th
    request, counted from 0.
    """

    def __init__(self, respond: Callable[[int, dict], Response]) -> None:
        self.requests: list[tuple[str, dict, dict]] = []
        lock = threading.Lock()
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    n = len(requests)
                    requests.append((self.path, body, dict(self.headers)))
                status, data = respond(n, body)
                text = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                if text.endswith(TRUNCATED):
                    self.send_header("Content-Length", str(len(text) + 9))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def sizes(self) -> list[int]:
        return [len(body["input"]) for _, body, _ in self.requests]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[int, dict], Response]], Endpoint]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    endpoints: list[Endpoint] = []

    def start(respond: Callable[[int, dict], Response]) -> Endpoint:
        endpoints.append(Endpoint(respond))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        endpoint.close()


def numbers(text: str) -> list[float]:
    return [float(len(text)), 3.0, 0.0]


def embeddings(n: int, body: dict) -> Response:
    """Return embeddings that are neither in the order of the texts nor of unit norm."""
    rows = [
        {"index": i, "embedding": numbers(text), "object": "embedding"}
        for i, text in enumerate(body["input"])
    ]
    return 200, {"object": "list", "data": rows[::-1], "model": body["model"]}


async def connect(endpoint: Endpoint, **options: Any) -> EndpointEmbedder:
    embedder = EndpointEmbedder(endpoint.url, "words", "sk-secret", backoff=0.001, **options)
    await embedder.connect()
    return embedder


async def test_an_endpoint_receives_batches_and_its_vectors_are_normalised(serve):
    endpoint = serve(embeddings)
    embedder = await connect(endpoint, batch=2)
    vectors = await embedder.embed(TEXTS)
    plain = np.array([numbers(text or " ") for text in TEXTS], np.float32)
    assert np.allclose(vectors, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-6)
    assert (vectors.dtype, embedder.dim, embedder.name) == (np.float32, 3, "words-3")
    assert endpoint.sizes == [1, 2, 2, 1]
    path, body, headers = endpoint.requests[1]
    assert (path, body["model"], body["encoding_format"]) == ("/v1/embeddings", "words", "float")
    assert headers["Authorization"] == "Bearer sk-secret"
    assert (await embedder.embed([])).shape == (0, 3)
    embedder.close()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_temporary_failures_are_retried(serve, status: int):
    endpoint = serve(
        lambda n, body: embeddings(n, body) if n in (0, 3) else (status, {"error": "wait"})
    )
    embedder = await connect(endpoint)
    assert (await embedder.embed(["Go west."])).shape == (1, 3)
    assert endpoint.sizes == [1, 1, 1, 1]
    with pytest.raises(
        EngineError, match=rf"/v1/embeddings: {status} .*wait.*{ATTEMPTS} attempts failed"
    ):
        await embedder.embed(["Go west."])
    assert len(endpoint.requests) == 4 + ATTEMPTS
    embedder.close()


@pytest.mark.parametrize(
    ("status", "message"), [(503, "503 Service Unavailable: wait until"), (200, "IncompleteRead")]
)
async def test_a_truncated_response_is_retried(serve, status: int, message: str):
    endpoint = serve(lambda n, body: embeddings(n, body) if n in (0, 2) else (status, TRUNCATED))
    embedder = await connect(endpoint)
    assert (await embedder.embed(["Go west."])).shape == (1, 3)
    assert len(endpoint.requests) == 3
    with pytest.raises(
        EngineError, match=rf"/v1/embeddings: {message}.*{ATTEMPTS} attempts failed"
    ):
        await embedder.embed(["Go west."])
    embedder.close()


@pytest.mark.parametrize(
    "url", ["http://[::1/v1", "http://höst/v1/é", "http://" + "x" * 99 + ".y/v1"]
)
async def test_an_invalid_url(url: str):
    embedder = EndpointEmbedder(url, "words", backoff=0.0)
    with pytest.raises(EngineError, match=r"^embedder http://"):
        await embedder.connect()
    embedder.close()


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            (401, {"error": "Incorrect API key provided: sk-secret"}),
            "401 Unauthorized: .*Incorrect API key provided: …",
        ),
        ((404, {"error": "no model words"}), "404 Not Found: .*no model words"),
        ((302, b""), "302 Found"),
        ((200, b"<html>"), "does not contain embeddings of 1 texts: <html>"),
        ((200, {"data": []}), "does not contain embeddings of 1 texts"),
        (
            (200, {"data": [{"index": 0, "embedding": [1.0, 2.0]}]}),
            "the vectors now have dimension 2, not 3 as in the first response",
        ),
        (
            (200, b'{"data": [{"index": 0, "embedding": [1.0, NaN, 0.0]}]}'),
            "are not vectors of finite numbers",
        ),
        ((200, {"data": [{"index": 0, "embedding": "AACA"}]}), "does not contain embeddings"),
        (
            (200, {"data": [{"index": 0, "embedding": [1.0, 10**400, 0.0]}]}),
            "does not contain embeddings",
        ),
        (
            (200, {"data": [{"index": 10**400, "embedding": [1.0, 2.0, 0.0]}]}),
            "does not contain embeddings",
        ),
        (
            (200, b'{"data": [{"index": 0, "embedding": [1e39, 1e400, 0.0]}]}'),
            "are not vectors of finite numbers",
        ),
        ((200, b'{"data": ' + b"[" * 100_000), "does not contain embeddings"),
        (
            (200, b'{"data": [{"index": 0, "embedding": ' + b"[" * 99 + b"]" * 99 + b"}]}"),
            "does not contain embeddings",
        ),
        ((401, TRUNCATED), "401 Unauthorized: wait until$"),
    ],
)
async def test_permanent_failures_are_not_retried(serve, response: Response, message: str):
    endpoint = serve(lambda n, body: response if n else embeddings(n, body))
    embedder = await connect(endpoint)
    with pytest.raises(EngineError, match=message) as caught:
        await embedder.embed(["Go west."])
    assert "sk-secret" not in str(caught.value)
    assert len(endpoint.requests) == 2
    embedder.close()


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


async def config_error(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        async with open_embedder(EmbedderSection(**settings)):
            raise AssertionError("opened")
    return str(caught.value)


async def test_the_config_opens_each_kind(
    random_bert: Path, serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORDS_KEY", "sk-secret")
    endpoint = serve(embeddings)
    sections = (
        EmbedderSection(model=str(random_bert)),
        EmbedderSection(model=endpoint.url, name="words", key_env="WORDS_KEY"),
    )
    for section, dim in zip((EmbedderSection(model="hash"), *sections), (384, 32, 3), strict=True):
        require_embedder(section)
        async with open_embedder(section) as embedder:
            assert embedder.dim == dim
            assert (await embedder.embed(["Go west."])).shape == (1, dim)
    assert endpoint.requests[0][2]["Authorization"] == "Bearer sk-secret"


async def test_a_deterministic_run_embeds_texts_one_by_one(random_bert: Path):
    async with open_embedder(
        EmbedderSection(model=str(random_bert)), deterministic=True
    ) as embedder:
        together = await embedder.embed(TEXTS)
        assert all(
            [
                np.array_equal((await embedder.embed([text]))[0], vector)
                for text, vector in zip(TEXTS, together, strict=True)
            ]
        )


async def test_an_endpoint_that_does_not_answer(serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crl.embedders.endpoint.ATTEMPTS", 1)
    endpoint = serve(embeddings)
    endpoint.close()
    text = await config_error(model=endpoint.url, name="words")
    assert text.startswith(
        f"embedder.model = '{endpoint.url}': embedder {endpoint.url}/embeddings: "
    )
    assert "refused" in text
    assert text.endswith(
        "Check embedder.model, embedder.name and embedder.key_env, "
        "and that the endpoint is running."
    )
    text = await config_error(model=endpoint.url, name="words", key_env="NO_SUCH_KEY")
    assert text == (
        "embedder.key_env = 'NO_SUCH_KEY': this environment variable is not set or is empty. "
        "Export it, or remove the setting."
    )


@pytest.mark.parametrize(
    "key",
    ["sk-secret\r", "sk-secret\n", "\tsk-secret", "sk-secret…", "sk-secret\udcff", "sk-sécret"],
)
async def test_an_invalid_key_is_rejected_and_not_printed(
    serve, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setenv("WORDS_KEY", key)
    endpoint = serve(embeddings)
    text = await config_error(model=endpoint.url, name="words", key_env="WORDS_KEY")
    assert text == (
        "embedder.key_env = 'WORDS_KEY': the variable's value cannot be sent: it contains "
        "non-printable or non-ASCII characters, such as a line end. Export only the key."
    )
    assert endpoint.requests == []
    with pytest.raises(ConfigError, match="cannot be sent"):
        require_embedder(EmbedderSection(model=endpoint.url, name="words", key_env="WORDS_KEY"))


async def test_a_directory_without_an_encoder(random_bert: Path, tmp_path: Path):
    assert "is not hash, wordllama, a URL or a directory. Use hash, " in await config_error(
        model=str(tmp_path / "none")
    )
    assert "contains no config.json" in await config_error(model=str(tmp_path))
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    assert "the pooling mean and max_tokens is not supported" in await config_error(
        model=str(sentence_transformer_directory(tmp_path / "max", random_bert, pooling))
    )
    dense = sentence_transformer_directory(tmp_path / "dense", random_bert, {})
    (dense / "modules.json").write_text(
        '[{"path": "", "type": "a.Transformer"}, {"path": "2_Dense", "type": "a.Dense"}]'
    )
    assert "lists a module that is not supported: Dense" in await config_error(model=str(dense))
    (dense / "modules.json").write_text("[{")
    assert "modules.json': cannot be read (JSONDecodeError" in await config_error(model=str(dense))
    (dense / "modules.json").unlink()
    (dense / "model.safetensors").write_bytes(b"none")
    assert "the model cannot be loaded (" in await config_error(model=str(dense))


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            ["embedder.model=http://127.0.0.1/v1"],
            (
                "embedder.name = '': is required because embedder.model is the URL of an endpoint. "
                "Set it to the name of the model at the endpoint."
            ),
        ),
        (
            ["embedder.name=words"],
            (
                "embedder.name = 'words': only applies to an endpoint, but embedder.model is not a "
                "URL. Leave it out."
            ),
        ),
        (
            ["embedder.key_env=KEY"],
            (
                "embedder.key_env = 'KEY': only applies to an endpoint, but embedder.model is not "
                "a URL. Leave it out."
            ),
        ),
        (
            [
                "embedder.model=http://h/v1",
                "embedder.name=w",
                "run.deterministic=true",
                "rollout.max_staleness=0",
            ],
            "embedder.model = 'http://h/v1': cannot be an endpoint with run.deterministic: its "
            "vectors may depend on the other requests that it serves. "
            "Use hash, wordllama or the directory of an encoder.",
        ),
    ],
)
def test_settings_that_contradict_each_other(sets: list[str], text: str):
    with pytest.raises(ConfigError) as caught:
        load(["room"], sets=sets)
    assert str(caught.value) == text


def test_a_saved_run_finds_its_encoder_from_anywhere(
    random_bert: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(random_bert.parent)
    assert load(["room"], sets=[f"embedder.model={random_bert.name}"]).embedder.model == str(
        random_bert
    )


# ── the bank ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_embedder_embeds_the_bank_again_in_batches(
    random_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crl.manager.manager.EMBED_BATCH", 2)
    texts = ["Go west.", "Go east.", "Mind the trap."]
    path, engine = tmp_path / "bank.sqlite", answering(lambda prompt: add(*texts))
    settings = ManagerSettings(retrieval=RetrievalSection(margin=0.0, min_similarity=-1.0))
    opened = await open_manager(path, engine, settings)
    await opened.submit(request())
    await opened.drain()
    await opened.aclose()
    notes: list[str] = []
    stages: list[tuple[str, int, int]] = []

    class Notes(Monitor):
        def note(self, text: str) -> None:
            notes.append(text)

        def progress(self, stage: str, done: int, total: int) -> None:
            stages.append((stage, done, total))

    words = WordEmbedder()
    words.name = "other words"
    opened = await open_manager(
        path, engine, settings, embedder=words, progress=embedding_progress(Notes())
    )
    await opened.aclose()
    assert words.calls == [texts[:2], texts[2:]]
    assert notes == ["embedding 3 experiences of the bank again (words → other words)"]
    steps = [(0, 3), (2, 3), (3, 3), (3, 3)]
    assert stages == [("embedding the bank", *step) for step in steps]
    async with open_embedder(EmbedderSection(model=str(random_bert))) as encoder:
        for _ in range(2):
            opened = await open_manager(
                path, engine, settings, embedder=encoder, progress=embedding_progress(Notes())
            )
            (hit,) = await opened.search([search("Mind the trap.")])
            assert hit is not None
            assert hit.text == "Mind the trap."
            await opened.aclose()
    assert len(notes) == 2, "the second time, there was nothing to embed"
    assert f"(other words → {encoder.name})" in notes[1]


async def test_a_search_fails_if_the_endpoint_fails(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crl.embedders.endpoint.ATTEMPTS", 1)
    embedder = await connect(endpoint := serve(embeddings))
    opened = await open_manager(tmp_path / "bank.sqlite", answering(str), embedder=embedder)
    endpoint.close()
    with pytest.raises(EngineError, match=r"embedder http://.*/v1/embeddings: "):
        await opened.search([search("Go west.")])
    await opened.aclose()
    embedder.close()


def read_terminal(screen: int) -> bytes:
    """Return the next output on the terminal, or b"" once the other side is closed."""
    try:
        return os.read(screen, 1 << 16)
    except OSError:
        return b""


def test_in_a_terminal_progress_is_a_bar():
    code = "with embedding_progress(Monitor())(4, '') as advance:\n    advance(3)\n    advance(1)"
    imports = "from crl.protocols import Monitor\nfrom crl.run.progress import embedding_progress"
    screen, terminal = pty.openpty()
    command = [sys.executable, "-c", f"{imports}\n{code}"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        screen_text = b"".join(iter(partial(read_terminal, screen), b"")).decode()
        output, _ = process.communicate()
    os.close(screen)
    assert (process.returncode, output) == (0, b"")
    assert "embedding the bank" in screen_text
    assert "100%" in screen_text


def test_a_dry_run_names_the_embedder(random_bert: Path, tmp_path: Path):
    lines = plan(
        load(["room"], sets=[f"embedder.model={random_bert}", "embedder.device=cpu"])
    ).splitlines()
    assert f"embedder   {random_bert} on cpu" in lines
    with pytest.raises(ConfigError, match="is not hash, wordllama, a URL or a directory"):
        require(load(["room"], sets=[f"embedder.model={tmp_path / 'none'}"]))


def test_bank_search_uses_the_embedder_of_the_run(random_bert: Path, tmp_path: Path):
    run = finished_run(tmp_path / "run")

    async def embed_again() -> None:
        async with open_embedder(EmbedderSection(model=str(random_bert))) as encoder:
            await (
                await open_manager(run / "bank.sqlite", answering(str), embedder=encoder)
            ).aclose()

    asyncio.run(embed_again())
    bank_copy = copy_of(run, tmp_path)
    dump(
        load(["room"], sets=["extractor.model=tiny-actor", f"embedder.model={random_bert}"]),
        run / "config.json",
    )
    rows = parsed("search", run, "Mind the trap.")
    assert (rows[0]["text"], rows[0]["similarity"]) == ("Mind the trap.", pytest.approx(1.0))
    result = bank("search", bank_copy, "Mind the trap.")
    assert result.exit_code == 2
    assert (
        "cannot be compared with those of the search's embedder, hash-char_wb-2-4-384"
        in result.stderr
    )
