"""Make an extractor of 2.7 times the parameters of the bundled one, for Figure 9a.

    python benchmarks/large_extractor.py

The recipe is that of the bundled extractor with a larger shape. The model is written to
build/models/large-extractor. This takes an hour on one core.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crl.tiny.recipe import RECIPES, make_model
from crl.tiny.warm_start import Shape

FOLDER = Path(__file__).parents[1] / "build" / "models" / "large-extractor"
SHAPE = Shape(hidden=112, intermediate=336)


def main() -> None:
    FOLDER.mkdir(parents=True)
    recipe = replace(RECIPES["tiny-extractor"], shape=SHAPE)
    make_model(FOLDER, recipe, 0, command="python benchmarks/large_extractor.py")


if __name__ == "__main__":
    main()
