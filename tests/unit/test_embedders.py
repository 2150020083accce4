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
from banks import bank, copy_of, finished_run, parsed
from extractors import WordEmbedder, add, answering, manager, request, search
from transformers import AutoModel, AutoTokenizer

from crl.config.load import dump, load
from crl.config.schema import EmbedderSection
from crl.embedders import open_embedder, require_embedder
from crl.embedders.encoder import EncoderEmbedder, pooled
from crl.embedders.endpoint import ATTEMPTS, EndpointEmbedder
from crl.embedders.recipe import EncoderSettings, read_recipe
from crl.errors import ConfigError, EngineError
from crl.manager import ManagerSettings, RetrievalSettings
from crl.run.plan import plan
from crl.run.progress import embedding_progress

TEXTS = [
    "Go west.",
    "Reach the stairs down (>) of the azure cellar, then wait.",
    "",
    "Follow the left wall.",
    "Go west.",
]


# ── directories ───────────────────────────────────────────────────────────────────────────────────


def described(folder: Path, model: Path, pooling: Mapping[str, Any], **files: Any) -> Path:
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


def hidden_of(path: Path, text: str, limit: int = 64) -> torch.Tensor:
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
        encoder = EncoderEmbedder(read_recipe(path), "cpu", **options)
        try:
            return await encoder.embed(texts)
        finally:
            encoder.close()

    return asyncio.run(run())


def name_of(recipe: EncoderSettings) -> str:
    encoder = EncoderEmbedder(recipe, "cpu")
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
    assert pooled(hidden, mask, "mean").tolist() == [[2.0, 4.0], [6.0, 1.0]]
    assert pooled(hidden, mask, "cls").tolist() == [[1.0, 2.0], [4.0, 0.0]]
    assert pooled(hidden, mask, "lasttoken").tolist() == [[3.0, 6.0], [8.0, 1.0]]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_a_plain_encoder_is_pooled_by_the_mean_whatever_shares_its_batch(
    random_bert: Path, batch: int
):
    vectors = encode(random_bert, *TEXTS, batch=batch)
    assert (vectors.shape, vectors.dtype) == ((5, 32), np.float32)
    assert np.allclose(
        vectors, [unit(hidden_of(random_bert, text).mean(0)) for text in TEXTS], atol=1e-5
    )
    assert abs(vectors[0] @ vectors[1]) < 0.99


def test_no_text_no_vector(random_bert: Path):
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
def test_the_files_of_sentence_transformers_say_how_it_is_pooled(
    random_bert: Path, tmp_path: Path, pooling: dict, row: int
):
    path = described(tmp_path / "encoder", random_bert, pooling)
    assert np.allclose(
        encode(path, *TEXTS), [unit(hidden_of(random_bert, text)[row]) for text in TEXTS], atol=1e-5
    )


def test_a_decoder_gives_its_last_token(random_qwen3: Path, tmp_path: Path):
    path = described(tmp_path / "decoder", random_qwen3, {"pooling_mode_lasttoken": True})
    saved = AutoTokenizer.from_pretrained(path)
    saved.padding_side = "left"  # as in Qwen3-Embedding
    saved.save_pretrained(path)
    assert np.allclose(
        encode(path, *TEXTS),
        [unit(hidden_of(random_qwen3, text, 4096)[-1]) for text in TEXTS],
        atol=1e-5,
    )


def test_default_prompt_lower_case_and_token_limit(random_bert: Path, tmp_path: Path):
    prompts = {
        "prompts": {"query": "Search: ", "document": "Text: "},
        "default_prompt_name": "document",
    }
    path = described(
        tmp_path / "encoder", random_bert, {"pooling_mode_mean_tokens": True},
        config_sentence_transformers=prompts,
        sentence_bert_config={"max_seq_length": 9, "do_lower_case": True},
    )  # fmt: skip
    long = "Go WEST, then wait. " * 9
    assert np.allclose(
        encode(path, long)[0],
        unit(hidden_of(random_bert, f"text: {long.lower()}", 9).mean(0)),
        atol=1e-5,
    )
    prompts["default_prompt_name"] = None  # type: ignore[assignment]
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert np.allclose(
        encode(path, "Go WEST")[0], unit(hidden_of(random_bert, "go west", 9).mean(0)), atol=1e-5
    )


def test_a_text_longer_than_the_model_reads_is_cut(random_bert: Path):
    long = "north east south west " * 100
    assert np.allclose(
        encode(random_bert, long)[0], unit(hidden_of(random_bert, long).mean(0)), atol=1e-5
    )


def test_model_in_a_folder_of_its_own(random_bert: Path, tmp_path: Path):
    path = described(tmp_path / "encoder", random_bert, {"pooling_mode_mean_tokens": True})
    (path / "0_Transformer").mkdir()
    for file in random_bert.iterdir():
        (path / file.name).rename(path / "0_Transformer" / file.name)
    text = (path / "modules.json").read_text().replace('"path": ""', '"path": "0_Transformer"')
    (path / "modules.json").write_text(text)
    assert np.allclose(encode(path, "Go west."), encode(random_bert, "Go west."), atol=1e-6)


def test_its_name_follows_from_what_the_vectors_depend_on(random_bert: Path, tmp_path: Path):
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
    recipes = (
        EncoderSettings(other),
        EncoderSettings(random_bert, "cls"),
        EncoderSettings(random_bert, prompt="a "),
        EncoderSettings(random_bert, lower=True),
    )
    assert len({name, *map(name_of, recipes)}) == 5


async def test_an_encoder_computes_on_a_thread_of_its_own(random_bert: Path):
    encoder, threads = EncoderEmbedder(EncoderSettings(random_bert), "cpu"), set()
    encoder._model.register_forward_hook(lambda *_: threads.add(threading.current_thread().name))
    await asyncio.gather(*(encoder.embed(TEXTS) for _ in range(4)))
    encoder.close()
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


async def test_an_encoder_that_fails_is_an_engine_that_failed(random_bert: Path):
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

Answer = tuple[int, Any]
"""HTTP status and body. A body of bytes is sent unchanged, any other body as JSON."""


CUT_OFF = b"wait until"
"""Ending of a body whose Content-Length is larger than the body."""


class Endpoint:
    """HTTP server on this machine.

    `asked` holds the requests with their headers. `answer` returns the answer to the n-th request,
    counted from 0.
    """

    def __init__(self, answer: Callable[[int, dict], Answer]) -> None:
        self.asked: list[tuple[str, dict, dict]] = []
        lock = threading.Lock()
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    n = len(asked)
                    asked.append((self.path, body, dict(self.headers)))
                status, data = answer(n, body)
                text = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                if text.endswith(CUT_OFF):
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
        return [len(body["input"]) for _, body, _ in self.asked]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[int, dict], Answer]], Endpoint]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made: list[Endpoint] = []

    def start(answer: Callable[[int, dict], Answer]) -> Endpoint:
        made.append(Endpoint(answer))
        return made[-1]

    yield start
    for endpoint in made:
        endpoint.close()


def numbers(text: str) -> list[float]:
    return [float(len(text)), 3.0, 0.0]


def embeddings(n: int, body: dict) -> Answer:
    """Return embeddings that are neither in the order of the texts nor of unit norm."""
    rows = [
        {"index": i, "embedding": numbers(text), "object": "embedding"}
        for i, text in enumerate(body["input"])
    ]
    return 200, {"object": "list", "data": rows[::-1], "model": body["model"]}


async def connected(endpoint: Endpoint, **options: Any) -> EndpointEmbedder:
    made = EndpointEmbedder(endpoint.url, "words", "sk-secret", backoff=0.001, **options)
    await made.connect()
    return made


async def test_an_endpoint_is_asked_in_batches_and_its_vectors_are_made_unit(serve):
    endpoint = serve(embeddings)
    made = await connected(endpoint, batch=2)
    vectors = await made.embed(TEXTS)
    plain = np.array([numbers(text or " ") for text in TEXTS], np.float32)
    assert np.allclose(vectors, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-6)
    assert (vectors.dtype, made.dim, made.name) == (np.float32, 3, "words-3")
    assert endpoint.sizes == [1, 2, 2, 1]
    path, body, headers = endpoint.asked[1]
    assert (path, body["model"], body["encoding_format"]) == ("/v1/embeddings", "words", "float")
    assert headers["Authorization"] == "Bearer sk-secret"
    assert (await made.embed([])).shape == (0, 3)
    made.close()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_is_refused_for_now_is_sent_again(serve, status: int):
    endpoint = serve(
        lambda n, body: embeddings(n, body) if n in (0, 3) else (status, {"error": "wait"})
    )
    made = await connected(endpoint)
    assert (await made.embed(["Go west."])).shape == (1, 3)
    assert endpoint.sizes == [1, 1, 1, 1]
    with pytest.raises(
        EngineError, match=rf"/v1/embeddings: {status} .*wait.*, {ATTEMPTS} times in a row"
    ):
        await made.embed(["Go west."])
    assert len(endpoint.asked) == 4 + ATTEMPTS
    made.close()


@pytest.mark.parametrize(
    ("status", "said"), [(503, "503 Service Unavailable: wait until, "), (200, "IncompleteRead")]
)
async def test_an_answer_that_breaks_off_is_asked_for_again(serve, status: int, said: str):
    endpoint = serve(lambda n, body: embeddings(n, body) if n in (0, 2) else (status, CUT_OFF))
    made = await connected(endpoint)
    assert (await made.embed(["Go west."])).shape == (1, 3)
    assert len(endpoint.asked) == 3
    with pytest.raises(EngineError, match=rf"/v1/embeddings: {said}.*{ATTEMPTS} times in a row"):
        await made.embed(["Go west."])
    made.close()


@pytest.mark.parametrize(
    "url", ["http://[::1/v1", "http://höst/v1/é", "http://" + "x" * 99 + ".y/v1"]
)
async def test_a_url_that_cannot_be_asked(url: str):
    made = EndpointEmbedder(url, "words", backoff=0.0)
    with pytest.raises(EngineError, match=r"^embedder http://"):
        await made.connect()
    made.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (401, {"error": "Incorrect API key provided: sk-secret"}),
            "401 Unauthorized: .*Incorrect API key provided: …",
        ),
        ((404, {"error": "no model words"}), "404 Not Found: .*no model words"),
        ((302, b""), "302 Found"),
        ((200, b"<html>"), "holds no embeddings of 1 texts: <html>"),
        ((200, {"data": []}), "holds no embeddings of 1 texts"),
        (
            (200, {"data": [{"index": 0, "embedding": [1.0, 2.0]}]}),
            "vectors of 2 numbers came, not of 3 as at first",
        ),
        (
            (200, b'{"data": [{"index": 0, "embedding": [1.0, NaN, 0.0]}]}'),
            "no vectors of finite numbers",
        ),
        ((200, {"data": [{"index": 0, "embedding": "AACA"}]}), "holds no embeddings"),
        ((200, {"data": [{"index": 0, "embedding": [1.0, 10**400, 0.0]}]}), "holds no embeddings"),
        (
            (200, {"data": [{"index": 10**400, "embedding": [1.0, 2.0, 0.0]}]}),
            "holds no embeddings",
        ),
        (
            (200, b'{"data": [{"index": 0, "embedding": [1e39, 1e400, 0.0]}]}'),
            "no vectors of finite numbers",
        ),
        ((200, b'{"data": ' + b"[" * 100_000), "holds no embeddings"),
        (
            (200, b'{"data": [{"index": 0, "embedding": ' + b"[" * 99 + b"]" * 99 + b"}]}"),
            "holds no embeddings",
        ),
        ((401, CUT_OFF), "401 Unauthorized: wait until$"),
    ],
)
async def test_what_will_not_go_well_fails_at_once_with_what_was_said(
    serve, answer: Answer, said: str
):
    endpoint = serve(lambda n, body: answer if n else embeddings(n, body))
    made = await connected(endpoint)
    with pytest.raises(EngineError, match=said) as caught:
        await made.embed(["Go west."])
    assert "sk-secret" not in str(caught.value)
    assert len(endpoint.asked) == 2
    made.close()


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


async def refused(**settings: Any) -> str:
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
    for section, dim in zip((EmbedderSection(), *sections), (384, 32, 3), strict=True):
        require_embedder(section)
        async with open_embedder(section) as embedder:
            assert embedder.dim == dim
            assert (await embedder.embed(["Go west."])).shape == (1, dim)
    assert endpoint.asked[0][2]["Authorization"] == "Bearer sk-secret"


async def test_an_encoder_of_a_deterministic_run_reads_texts_one_by_one(random_bert: Path):
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


async def test_an_endpoint_that_is_not_there(serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crl.embedders.endpoint.ATTEMPTS", 1)
    gone = serve(embeddings)
    gone.close()
    text = await refused(model=gone.url, name="words")
    assert text.startswith(f"embedder.model = '{gone.url}': embedder {gone.url}/embeddings: ")
    assert "refused" in text
    assert text.endswith(
        "Check embedder.model, embedder.name and embedder.key_env, and that the endpoint is up."
    )
    text = await refused(model=gone.url, name="words", key_env="NO_SUCH_KEY")
    assert text == (
        "embedder.key_env = 'NO_SUCH_KEY': the environment holds no such variable. "
        "Export it, or leave it out."
    )


@pytest.mark.parametrize(
    "key",
    ["sk-secret\r", "sk-secret\n", "\tsk-secret", "sk-secret…", "sk-secret\udcff", "sk-sécret"],
)
async def test_a_key_that_cannot_be_sent_is_refused_and_not_told(
    serve, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setenv("WORDS_KEY", key)
    endpoint = serve(embeddings)
    text = await refused(model=endpoint.url, name="words", key_env="WORDS_KEY")
    assert text == (
        "embedder.key_env = 'WORDS_KEY': what that variable holds cannot be sent: "
        "of its characters some are no printable ASCII, "
        "such as the end of a line. Export the key alone."
    )
    assert endpoint.asked == []
    with pytest.raises(ConfigError, match="cannot be sent"):
        require_embedder(EmbedderSection(model=endpoint.url, name="words", key_env="WORDS_KEY"))


async def test_a_directory_that_is_no_encoder(random_bert: Path, tmp_path: Path):
    assert "is neither hash nor a URL, and no directory. Use hash, " in await refused(
        model=str(tmp_path / "none")
    )
    assert "holds no config.json" in await refused(model=str(tmp_path))
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    assert "its pooling is mean and max_tokens" in await refused(
        model=str(described(tmp_path / "max", random_bert, pooling))
    )
    dense = described(tmp_path / "dense", random_bert, {})
    (dense / "modules.json").write_text(
        '[{"path": "", "type": "a.Transformer"}, {"path": "2_Dense", "type": "a.Dense"}]'
    )
    assert "has a module that is not served: Dense" in await refused(model=str(dense))
    (dense / "modules.json").write_text("[{")
    assert "modules.json': it cannot be read (JSONDecodeError" in await refused(model=str(dense))
    (dense / "modules.json").unlink()
    (dense / "model.safetensors").write_bytes(b"none")
    assert "it cannot be loaded (" in await refused(model=str(dense))


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            ["embedder.model=http://127.0.0.1/v1"],
            "embedder.name = '': an endpoint serves models by name. Give the model's name there.",
        ),
        (
            ["embedder.name=words"],
            (
                "embedder.name = 'words': is of an endpoint, but embedder.model is no URL. "
                "Leave it out."
            ),
        ),
        (
            ["embedder.key_env=KEY"],
            (
                "embedder.key_env = 'KEY': is of an endpoint, but embedder.model is no URL. "
                "Leave it out."
            ),
        ),
        (
            [
                "embedder.model=http://h/v1",
                "embedder.name=w",
                "run.deterministic=true",
                "rollout.max_staleness=0",
            ],
            "embedder.model = 'http://h/v1': with run.deterministic the vectors must not depend "
            "on what else an endpoint computes. "
            "Use hash or an encoder's directory.",
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


async def test_another_embedder_embeds_a_bank_again_in_parts(
    random_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crl.manager.manager.EMBEDDED", 2)
    texts = ["Go west.", "Go east.", "Mind the trap."]
    path, engine = tmp_path / "bank.sqlite", answering(lambda prompt: add(*texts))
    settings = ManagerSettings(retrieval=RetrievalSettings(margin=0.0, min_similarity=-1.0))
    made = await manager(path, engine, settings)
    await made.submit(request())
    await made.drain()
    await made.aclose()
    notes: list[str] = []
    words = WordEmbedder()
    words.name = "other words"
    made = await manager(
        path, engine, settings, embedder=words, progress=embedding_progress(notes.append)
    )
    await made.aclose()
    assert words.calls == [texts[:2], texts[2:]]
    assert notes == ["embedding the bank's experiences, 3"]
    async with open_embedder(EmbedderSection(model=str(random_bert))) as encoder:
        for _ in range(2):
            made = await manager(
                path, engine, settings, embedder=encoder, progress=embedding_progress(notes.append)
            )
            (hit,) = await made.search([search("Mind the trap.")])
            assert hit is not None
            assert hit.text == "Mind the trap."
            await made.aclose()
    assert len(notes) == 2  # the second time, there was nothing to embed


async def test_an_endpoint_that_goes_away_fails_the_search(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crl.embedders.endpoint.ATTEMPTS", 1)
    embedder = await connected(endpoint := serve(embeddings))
    made = await manager(tmp_path / "bank.sqlite", answering(str), embedder=embedder)
    endpoint.close()
    with pytest.raises(EngineError, match=r"embedder http://.*/v1/embeddings: "):
        await made.search([search("Go west.")])
    await made.aclose()
    embedder.close()


def read_terminal(screen: int) -> bytes:
    """Return the next output on the terminal, or b"" once the other side is closed."""
    try:
        return os.read(screen, 1 << 16)
    except OSError:
        return b""


def test_in_a_terminal_progress_is_a_bar():
    code = "with embedding_progress(print)(4) as advance:\n    advance(3)\n    advance(1)"
    screen, terminal = pty.openpty()
    command = [sys.executable, "-c", f"from crl.run.progress import embedding_progress\n{code}"]
    surroundings = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env=surroundings
    ) as process:
        os.close(terminal)
        shown = b"".join(iter(partial(read_terminal, screen), b"")).decode()
        said, _ = process.communicate()
    os.close(screen)
    assert (process.returncode, said) == (0, b"")
    assert "embedding the bank" in shown
    assert "100%" in shown


def test_a_dry_run_names_the_embedder(random_bert: Path, tmp_path: Path):
    lines = plan(
        load(["room"], sets=[f"embedder.model={random_bert}", "embedder.device=cpu"])
    ).splitlines()
    assert f"embedder   {random_bert} on cpu" in lines
    with pytest.raises(ConfigError, match="is neither hash nor a URL"):
        plan(load(["room"], sets=[f"embedder.model={tmp_path / 'none'}"]))


def test_bank_search_uses_the_embedder_of_the_run(random_bert: Path, tmp_path: Path):
    run = finished_run(tmp_path / "run")

    async def embed_again() -> None:
        async with open_embedder(EmbedderSection(model=str(random_bert))) as encoder:
            await (await manager(run / "bank.sqlite", answering(str), embedder=encoder)).aclose()

    asyncio.run(embed_again())
    alone = copy_of(run, tmp_path)
    dump(
        load(["room"], sets=["extractor.model=tiny-actor", f"embedder.model={random_bert}"]),
        run / "config.json",
    )
    rows = parsed("search", run, "Mind the trap.")
    assert (rows[0]["text"], rows[0]["similarity"]) == ("Mind the trap.", pytest.approx(1.0))
    result = bank("search", alone, "Mind the trap.")
    assert result.exit_code == 2
    assert (
        "the bank's vectors are not of the embedder that search has. It has hash-char_wb-2-4-384"
        in result.stderr
    )
