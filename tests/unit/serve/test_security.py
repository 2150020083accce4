"""Protection of the server: hosts, token, headers, sizes and paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from crl.serve.app import STATIC, create_app
from crl.serve.security import MAX_BYTES, POLICY
from crl.serve.site import Site
from support.asgi import request

SECRET = "the content of a file outside of all runs"
TOKEN = "a-long-random-token"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, beside a secret file."""
    root = tmp_path_factory.mktemp("site") / "root"
    (root / "run").mkdir(parents=True)
    (root / "run" / "config.json").write_text("{}")
    for path in (root.parent / "secret.txt", root / "secret.txt", root / "run" / "secret.txt"):
        path.write_text(SECRET)
    return root


@pytest.fixture(scope="module")
def app(root: Path) -> Starlette:
    return create_app(Site(root))


def test_addresses_name_a_server_with_a_token(root: Path):
    """No other site can name a server by an IP address, so DNS rebinding needs a name."""
    app = create_app(Site(root), hosts=("Node7",), token="t0", cookie="c")
    for host in ("192.0.2.2:8300", "[2001:db8::1]", "node7:8300"):
        assert request(app, "/", host=host).status == 403, "the token is missing"
    answer = request(app, "/", host="evil.example")
    assert answer.status == 400
    text = answer.body.decode()
    assert text.endswith("address that crl serve has printed or an IP address of the machine.\n")
    assert "node7" not in text.lower()
    assert request(app, "/", host="[::]:8300").status == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8300", "[::1]:8300", "LOCALHOST"])
def test_own_hosts(app: Starlette, host: str):
    assert request(app, "/", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:8300", "localhost.evil.example", "", "[::1", "*"],
)
def test_foreign_hosts_are_refused(app: Starlette, host: str):
    """A page of another site whose name leads to this address (DNS rebinding) gets nothing."""
    for target in ("/", "/runs/run", "/events", "/static/style.css"):
        answer = request(app, target, host=host)
        assert answer.status == 400
        assert f"The host {host!r} in the address is not this server." in answer.body.decode()


def test_headers_of_every_response(app: Starlette):
    for target in ("/", "/runs/none", "/none", "/static/style.css", "/runs/run/log"):
        headers = request(app, target).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        cached = "no-cache" if target.startswith("/static") else "no-store"
        assert headers["cache-control"] == cached
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


@pytest.mark.parametrize("site", ["cross-site", "same-site", "x"])
def test_other_sites_may_link_to_pages_and_load_nothing(app: Starlette, site: str):
    for target in ("/", "/runs/run/log", "/static/style.css", "/events"):
        for mode in ("no-cors", "cors", "websocket", ""):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
            answer = request(app, target, headers=headers)
            assert answer.status == 403
            assert answer.headers["content-security-policy"] == POLICY
    navigation = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    assert request(app, "/", headers=navigation).status == 200
    for own in ("same-origin", "none"):
        headers = {"sec-fetch-site": own, "sec-fetch-mode": "no-cors"}
        assert request(app, "/static/style.css", headers=headers).status == 200


def test_nothing_is_answered_without_the_token(root: Path):
    app = create_app(Site(root), token=TOKEN, cookie="crl-serve-8300")
    for target in ("/", "/runs/run", "/static/style.css", "/none", "/?token=", "/?token=wrong"):
        assert request(app, target).status == 403
    for cookie in ("", "crl-serve-8300=", f"other={TOKEN}", f"crl-serve-8300={TOKEN}x"):
        assert request(app, "/", headers={"cookie": cookie}).status == 403


def test_the_token_becomes_a_cookie(root: Path):
    app = create_app(Site(root), token=TOKEN, cookie="crl-serve-8300")
    answer = request(app, f"/?token={TOKEN}")
    assert answer.status == 200
    assert TOKEN not in answer.body.decode()
    cookie, *attributes = answer.headers["set-cookie"].split("; ")
    assert cookie == f"crl-serve-8300={TOKEN}"
    assert {"HttpOnly", "SameSite=strict"} <= set(attributes)
    page = request(app, "/", headers={"cookie": cookie})
    assert page.status == 200
    assert "Runs" in page.body.decode()


def test_the_host_is_checked_also_with_the_token(root: Path):
    app = create_app(Site(root), token=TOKEN)
    cookie = {"cookie": f"crl-serve={TOKEN}"}
    assert request(app, "/", host="evil.example", headers=cookie).status == 400


@pytest.mark.parametrize("announced", [True, False])
def test_responses_have_a_maximum_size(root: Path, announced: bool):
    def large(_: Request) -> Response:
        part = "x" * (MAX_BYTES // 4)
        return PlainTextResponse(part * 5) if announced else StreamingResponse([part] * 5)

    app = create_app(Site(root))
    app.router.routes.append(Route("/large", large))
    with pytest.raises(RuntimeError, match="exceeds"):
        request(app, "/large")


def test_static_files_are_a_fixed_set(app: Starlette):
    for name in STATIC:
        answer = request(app, f"/static/{name}")
        assert answer.status == 200
        assert answer.body
    for name in ("serve.css", "..", "../app.py", "%2e%2e%2fapp.py", "style.css/", ""):
        assert request(app, f"/static/{name}").status in (307, 404)


def test_only_get(app: Starlette):
    for method in ("POST", "PUT", "DELETE", "TRACE", "X"):
        assert request(app, "/", method=method).status == 405
        assert request(app, "/runs/run/log", method=method).status == 405


PAGES = ("/", "/static/", "/rows/", "/runs/", "/runs/run/", "/runs/run/parts/", "/compare?run=",
         "/runs/run/log?to=")  # fmt: skip
PIECES = ("..", "%2e%2e", "%2f", "/", "\\", "%5c", "%00", "secret.txt", "run", "root",
          "config.json", "%252e%252e", "log", "settings", "~", "file:///", "C:", "\ud800",
          "\u202e")  # fmt: skip


@given(
    st.sampled_from(PAGES),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=8).map("".join),
)
def test_no_address_leads_to_another_file(app: Starlette, page: str, rest: str):
    """Nothing but pages and errors, whatever an address is made of."""
    target = (page + rest).replace("#", "")
    if "events" in target:  # a stream without an end
        return
    answer = request(app, target)
    assert answer.status in (200, 303, 307, 400, 404, 405, 500)
    assert SECRET not in answer.body.decode("utf-8", "replace")
    if answer.status == 500:  # of the run, whose config is empty, and nothing else
        assert "config.json" in answer.body.decode()


def test_an_unexpected_error_says_nothing_about_it(root: Path, monkeypatch: pytest.MonkeyPatch):
    app = create_app(Site(root))

    def fail(_: Request) -> HTMLResponse:
        raise ZeroDivisionError(SECRET)

    app.router.routes.append(Route("/fail", fail))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        response = client.get("/fail")
    assert response.status_code == 500
    assert response.text == "An error of the server; see its terminal.\n"
    assert response.headers["content-security-policy"] == POLICY
