"""A trained run, and a client of the server of its directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from crl.serve.app import create_app
from crl.serve.site import Site
from support.report_runs import train_for_report


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_for_report(tmp_path_factory.mktemp("serve") / "first")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may change: the only run of its directory."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "first"))


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    """A client of the server of the directory with the run."""
    with TestClient(create_app(Site(run.parent)), base_url="http://127.0.0.1") as client:
        yield client
