"""The notebook of the quickstart, run from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.paths import ROOT, python_environment

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (make setup-dev)")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (make setup-dev)")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (make setup-dev)")

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # otherwise in the home directory
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    (run,) = (tmp_path / "runs").iterdir()
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"] == [1, 2, 3]
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    texts = {
        name: "".join(output.get("text", "") for output in found) for name, found in outputs.items()
    }
    assert texts["read"].count("success") == 3
    assert any("image/png" in output.get("data", ()) for output in outputs["plot"])
    assert "cosine" in texts["search"]
    assert "guided" in texts["replay"]
