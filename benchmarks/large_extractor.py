"""Make an extractor of 2.7 times the parameters of the bundled one, for Figure 9a.

    python benchmarks/large_extractor.py

The recipe is that of the bundled extractor with a larger shape. The model is written to
build/models/large-extractor. This takes some hours on one core, and needs the extra scienceworld
and Java.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crl.run.halves.make_models import make_model
from crl.tiny.new_models import Shape
from crl.tiny.recipe import RECIPES

FOLDER = Path(__file__).parents[1] / "build" / "models" / "large-extractor"
SHAPE = Shape(hidden=112, intermediate=336)


def main() -> None:
    recipe = replace(RECIPES["tiny-extractor"], shape=SHAPE)
    make_model(FOLDER, recipe, 0, command="python benchmarks/large_extractor.py")


if __name__ == "__main__":
    main()
