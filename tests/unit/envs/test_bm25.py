import os
import subprocess
import sys
from pathlib import Path

from crl.envs.bm25 import Bm25
from support.paths import ROOT


def test_scores() -> None:
    """Check that words are stemmed and stop words are not indexed."""
    index = Bm25(["a red shirt", "blue shoes for the beach", "red shoes"])
    scores = index.scores("The RED shoe")
    assert scores is not None
    assert scores.argmax() == 2
    assert (scores > 0).all()
    assert index.scores("the trousers") is None


def test_jax_does_not_reserve_the_gpu(tmp_path: Path) -> None:
    """Check the import with a JAX that is installed, as on many GPU machines."""
    (tmp_path / "jax").mkdir()
    recorder = "import os\nprint('platforms:', os.environ.get('JAX_PLATFORMS'))\n"
    (tmp_path / "jax" / "__init__.py").write_text(recorder, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", "import crl.envs.webshop.search, crl.envs.search_qa.retrieval"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["platforms: cpu"]
