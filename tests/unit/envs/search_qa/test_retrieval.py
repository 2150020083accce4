"""Retrievers of search_qa: BM25, dense vectors, and an HTTP endpoint."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from crl.config.load import load
from crl.config.schema import EmbedderSection, SearchSection
from crl.embedders.blocking import open_blocking
from crl.envs.hosting.threads import ThreadHost
from crl.envs.search_qa import configured_small
from crl.envs.search_qa.http import ATTEMPTS, HttpRetriever
from crl.envs.search_qa.library import Libraries, generated_documents
from crl.envs.search_qa.questions import Document
from crl.envs.search_qa.retrieval import BM25Retriever, DenseRetriever, Retriever
from crl.errors import ConfigError, RolloutError, TransientError
from crl.planning.tasks import specs

DOCUMENTS = (
    Document("Paris", "Paris is the capital of France."),
    Document("Seine", "The Seine is a river in France."),
    Document("Vistula", "The Vistula is a river in Poland."),
    Document("Oder", "The Oder is a river in Poland."),
)


def titles(retriever: Retriever, query: str, n: int = 2) -> list[str]:
    return [document.title for document in retriever.search(query, n)]


def test_bm25() -> None:
    retriever = BM25Retriever(DOCUMENTS)
    assert titles(retriever, "the capital of France?") == ["Paris", "Seine"]
    assert titles(retriever, "rivers of Poland", 4) == ["Vistula", "Oder", "Seine"]
    assert titles(retriever, "rivers", 1) == ["Seine"], "the first of equal documents"
    assert titles(retriever, "zebra") == []
    assert titles(retriever, "the of") == []


def test_dense_retrieval_by_inner_product_with_prefixes() -> None:
    seen: list[str] = []
    axis = {"Paris": 0, "Seine": 1, "Vistula": 2, "Oder": 3}

    def embed(texts):
        seen.extend(texts)
        rows = np.zeros((len(texts), 4), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for name, index in axis.items():
                row[index] = 1.0 if name in text else 0.1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    retriever = DenseRetriever(
        DOCUMENTS, embed, query_prefix="query: ", document_prefix="passage: "
    )
    assert seen[0] == "passage: Paris\nParis is the capital of France."
    assert titles(retriever, "Oder", 1) == ["Oder"]
    assert titles(retriever, "Oder and Seine") == ["Seine", "Oder"], "ties are in corpus order"
    assert seen[-1] == "query: Oder and Seine"
    assert len(titles(retriever, "Oder", 9)) == 4


def test_dense_retrieval_by_an_embedder_of_crl_from_threads() -> None:
    section = SearchSection(retriever="dense", embedder=EmbedderSection(model="hash"))
    library = Libraries(section, open_blocking, official=False).open()
    names = [document.title for document in generated_documents()[::500]]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: titles(library.retriever, name, 1), names))
    assert found == [[name] for name in names]


def test_dense_retrieval_by_an_encoder(random_bert: Path) -> None:
    embed = open_blocking(EmbedderSection(model=str(random_bert), device="cpu"))
    retriever = DenseRetriever(DOCUMENTS, embed)
    for document in DOCUMENTS:
        assert titles(retriever, document.contents, 1) == [document.title]


def test_an_embedder_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    sets = ["retriever=dense", f"embedder.model={tmp_path / 'missing'}"]
    config = load(["search_qa"], sets=[f"tasks.search_qa.search.{setting}" for setting in sets])
    with pytest.raises(ConfigError, match=r"tasks\.search_qa\.search\.embedder\.model = "):
        specs(config)["search_qa"].curriculum.probe_tasks(1)


def test_a_library_is_opened_once() -> None:
    opened: list[EmbedderSection] = []

    def open_embed(section: EmbedderSection):
        opened.append(section)
        time.sleep(0.05)
        return open_blocking(section)

    section = SearchSection(
        retriever="dense", embedder=EmbedderSection(model="hash"), query_prefix="opened once: "
    )
    with ThreadPoolExecutor(4) as pool:
        several = list(
            pool.map(lambda _: Libraries(section, open_embed, official=False).open(), range(4))
        )
    assert len(opened) == 1
    assert all(library is several[0] for library in several)


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────

Reply = tuple[int, bytes]


class Endpoint:
    """Server with scripted replies, and the requests that it received."""

    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []
        self.reply: Callable[[int], Reply] = lambda number: (200, b"{}")
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.requests.append({"path": self.path, **json.loads(body)})
                status, content = endpoint.reply(len(endpoint.requests))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/retrieve"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.01,))
    thread.start()
    yield endpoint
    endpoint.server.shutdown()
    thread.join()
    endpoint.server.server_close()


def result(*items: object) -> bytes:
    return json.dumps({"result": [list(items)]}).encode()


def retriever_of(endpoint: Endpoint, timeout: float = 5.0) -> HttpRetriever:
    return HttpRetriever(endpoint.url, timeout, backoff=0.01)


def test_the_protocol_of_search_r1(endpoint: Endpoint) -> None:
    scored = {"document": {"id": "7", "contents": '"Seine"\nA river.\nIn France.'}, "score": 0.9}
    split = {"document": {"title": "Oder", "text": "A river."}, "score": 0.8}
    plain = {"id": "9", "contents": "Paris\nA town."}
    endpoint.reply = lambda number: (200, result(scored, split, plain))
    found = retriever_of(endpoint).search("rivers", 3)
    assert found == [
        Document("Seine", "A river.\nIn France."),
        Document("Oder", "A river."),
        Document("Paris", "A town."),
    ]
    assert endpoint.requests == [
        {"path": "/retrieve", "queries": ["rivers"], "topk": 3, "return_scores": True}
    ]
    assert len(retriever_of(endpoint).search("rivers", 2)) == 2, "never more than requested"


def test_temporary_failures_are_repeated(endpoint: Endpoint) -> None:
    endpoint.reply = lambda number: (503, b"busy") if number < ATTEMPTS else (200, result())
    assert retriever_of(endpoint).search("x", 3) == []
    assert len(endpoint.requests) == ATTEMPTS


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_stays_busy_is_a_transient_error(endpoint: Endpoint, status: int) -> None:
    endpoint.reply = lambda number: (status, b"")
    with pytest.raises(TransientError, match=f"env: retriever {endpoint.url}: {status}"):
        retriever_of(endpoint).search("x", 3)
    assert len(endpoint.requests) == ATTEMPTS


def test_a_timeout_is_a_transient_error(endpoint: Endpoint) -> None:
    def slow(number: int) -> Reply:
        time.sleep(0.3)
        return 200, result()

    endpoint.reply = slow
    with pytest.raises(TransientError, match="timed out"):
        retriever_of(endpoint, timeout=0.05).search("x", 3)


def test_a_missing_server_is_a_transient_error() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_port
    server.server_close()
    with pytest.raises(TransientError, match="refused"):
        HttpRetriever(f"http://127.0.0.1:{port}/retrieve", 1.0, backoff=0.01).search("x", 3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [[1]]}',
        b'{"result": [[{"document": {"id": "1"}}]]}',
        b'{"result": [[{"document": {"contents": 5}}]]}',
        b'{"result": [[{"document": null}]]}',
        b'{"result": [{"contents": "a"}]}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_response_is_an_error_and_not_empty(endpoint: Endpoint, content: bytes) -> None:
    endpoint.reply = lambda number: (200, content)
    with pytest.raises(RolloutError, match="not of Search-R1's form") as caught:
        retriever_of(endpoint).search("x", 3)
    assert not isinstance(caught.value, TransientError)
    assert caught.value.kind == "env"
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [302, 400, 404])
def test_a_refused_request_is_not_repeated(endpoint: Endpoint, status: int) -> None:
    endpoint.reply = lambda number: (status, b"")
    with pytest.raises(RolloutError, match=str(status)) as caught:
        retriever_of(endpoint).search("x", 3)
    assert not isinstance(caught.value, TransientError)
    assert len(endpoint.requests) == 1


async def test_a_failed_search_is_a_failed_episode(endpoint: Endpoint) -> None:
    """Check that the host keeps the kind of the error, so that the episode is retried."""
    spec = configured_small(
        SearchSection(retriever="http", url=endpoint.url, timeout=5.0), open_blocking
    )
    host = ThreadHost({"search_qa_small": (spec, "full")})
    (task,) = spec.curriculum.probe_tasks(1)
    for status, kind in ((500, TransientError), (404, RolloutError)):
        endpoint.reply = lambda number, status=status: (status, b"")
        environment = await host.acquire(task)
        await environment.reset(task)
        with pytest.raises(
            RolloutError, match=f"search_qa_small: step: retriever .* {status}"
        ) as e:
            await environment.step("<search>x</search>")
        assert type(e.value) is kind
        assert e.value.kind == "env"
        await host.release(environment)
    assert host.failures == 2
    await host.aclose()


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("retriever=http", "needs the address of its endpoint in url"),
        ("url=http://localhost:8000/retrieve", "url does not apply to the retriever bm25"),
        ("top_k=0", "should be greater than or equal to 1"),
        ("timeout=0", "should be greater than 0"),
        ("embedder.kind=vllm", "embedder must have the kind local"),
        ("embedder.model=auto", "a model other than auto"),
        ("embedder.model=http://localhost/v1", "embedder.name is required"),
        ("train_sets=[]", "at least 1 item"),
        ('test_sets=["squad"]', "should be one of nq, triviaqa"),
        ('test_sets=["nq", "nq"]', "test_sets must not name a set twice"),
    ],
)
def test_invalid_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["search_qa"], sets=[f"tasks.search_qa.search.{setting}"])


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/x",
        "http://",
        "http://host:99999/x",
        "http://a b/",
        "file:///x",
    ],
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="needs the address"):
        load(
            ["search_qa"],
            sets=["tasks.search_qa.search.retriever=http", f"tasks.search_qa.search.url={url}"],
        )


def test_addresses_have_no_password() -> None:
    url = "http://me:secret@localhost:8000/retrieve"
    sets = ["retriever=http", f"url={url}"]
    with pytest.raises(ConfigError, match="must not contain a user or a password"):
        load(["search_qa"], sets=[f"tasks.search_qa.search.{setting}" for setting in sets])


def test_other_environments_refuse_a_search_tool() -> None:
    config = load(["room"], sets=["tasks.room.search.top_k=2"])
    with pytest.raises(ConfigError, match="the environment room has no search tool"):
        specs(config)


@pytest.mark.parametrize("top_k", [1, 2])
def test_settings_reach_the_games(top_k: int) -> None:
    config = load(["search_qa"], sets=[f"tasks.search_qa.search.top_k={top_k}"])
    spec = specs(config)["search_qa"]
    game, tasks = spec.make_game("compact"), spec.curriculum.probe_tasks(2)
    game.reset(tasks[0])
    first, second = (task.goal.split()[-1] for task in tasks)
    assert len(game.step(f"search[{first} {second}]").text.splitlines()) == top_k
