"""The process of `crl serve`."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from crl.errors import ConfigError
from crl.serve.server import bound
from support.bank_commands import finished_run
from support.paths import python_environment
from support.whole_runs import crl, one_line


@contextmanager
def server(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `crl serve`, and yield the process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "crl", "serve", str(root), "--port", "0", *options],
        env=python_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        yield process, process.stdout.readline().split()[0]
    finally:
        process.kill()
        process.wait()


def get(address: str, **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    return connection.getresponse()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_interrupted(root: Path, number: signal.Signals):
    """An open event stream does not delay the end, and nothing is printed."""
    with server(root) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        assert get(address).status == 200
        stream = get(f"{address}events")
        assert stream.readline().strip() == b"event: parts"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert (out, err) == ("", "")
        assert process.returncode == 0


def changed_server(root: Path, changes: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server in which the lines `changes` have run. Return it and its address."""
    program = (
        f"{changes}from crl.cli.main import main\n"
        f"import sys; sys.argv = ['crl', 'serve', {str(root)!r}, '--port', '0']\n"
        "main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=python_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    return process, process.stdout.readline().split()[0]


def test_a_search_does_not_delay_the_end(tmp_path: Path):
    """A search by meaning that is still running ends with the process."""
    run = finished_run(tmp_path / "run")
    process, address = changed_server(
        run,
        "import time, crl.serve.meaning as meaning\n"
        "meaning.embedder_of = lambda *_: time.sleep(600)\n",
    )
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(get, f"{address}runs/run/bank?q=west&by=meaning")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        with suppress(http.client.HTTPException, OSError):
            search.result(timeout=10)


def test_nothing_is_written(root: Path):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with server(root) as (_, address):
        for page in ("", "runs/run", "runs/run/log", "runs/run/settings"):
            get(address + page).read()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_another_address_needs_the_token(root: Path):
    with server(root, "--host", "0.0.0.0") as (_, address):
        parts = urlsplit(address)
        assert parts.hostname == socket.gethostname().lower()
        local = f"http://127.0.0.1:{parts.port}/"
        assert get(local, Host="0.0.0.0").status == 400
        assert get(local, Host=parts.netloc).status == 403
        assert get(local).status == 403
        assert get(f"{local}runs/run").status == 403
        cookie = get(f"{local}?{parts.query}").getheader("Set-Cookie") or ""
        assert get(local, Cookie=cookie.partition(";")[0]).status == 200
        assert len(parts.query) > 40


def test_errors_on_stderr_are_escaped(root: Path):
    """A traceback may have texts of models."""
    process, address = changed_server(
        root,
        "import crl.serve.site as site\n"
        "def fail(*_, **__): raise ZeroDivisionError('\\x1b[2J\\u202e')\n"
        "site.Site.render = fail\n",
    )
    assert get(address).status == 500
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "ZeroDivisionError: \\x1b[2J\\u202e" in err
    assert not {"\x1b", "\u202e"} & set(err)


def test_a_used_port(root: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = crl("serve", root, "--port", other.getsockname()[1])
    assert result.exit_code == 2
    assert "address already in use" in one_line(result)
    assert "--port 0" in result.stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "no-such-host.invalid", "a" * 300])
def test_addresses_that_cannot_be_used(root: Path, host: str):
    result = crl("serve", root, "--host", host, "--port", "0")
    assert result.exit_code == 2
    assert "--host" in one_line(result)
    assert "0.0.0.0" in result.stderr


@pytest.mark.parametrize("port", [-1, 65536, 10**20])
def test_numbers_that_are_no_ports(root: Path, port: int):
    result = crl("serve", root, "--port", port)
    assert result.exit_code == 2
    assert "is not a port" in one_line(result)


def test_a_path_that_is_no_directory(tmp_path: Path):
    result = crl("serve", tmp_path / "none")
    assert result.exit_code == 2
    assert "is not a directory" in one_line(result)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use all ports")
def test_a_port_of_the_system():
    with pytest.raises(ConfigError, match="--port"):
        bound("127.0.0.1", 1)
