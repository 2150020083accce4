"""Recipes of the bundled models. `crl make-models` makes the models with fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass, field

from crl.tiny.drills import ACTOR_DRILLS, EXTRACTOR_DRILLS, Drill, search_qa, webshop
from crl.tiny.new_models import Shape
from crl.types import RoleName


@dataclass(frozen=True)
class Stage:
    """Part of a training: supervised fine-tuning with a warm-up and a linear decay."""

    drills: tuple[Drill, ...]
    """Drills whose demonstrations are trained on."""
    epochs: int
    """Epochs over all demonstrations."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW of each stage of a training."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup: int = 20
    """Number of updates over which the learning rate rises."""
    weight_decay: float = 0.01
    beta2: float = 0.98
    """Decay rate β₂."""


@dataclass(frozen=True)
class Recipe:
    """Recipe of a model: its shape, and its training in one or more stages."""

    role: RoleName
    """Role that the model learns."""
    stages: tuple[Stage, ...]
    """Stages in order. The last one has all drills of the model."""
    batch_tokens: int = 2048
    """Maximum number of tokens of an update. Larger updates cause more spelling errors."""
    context_weight: float = 1.0
    """Weight of the mean loss of the context tokens beside that of the demonstrator's tokens."""
    optimizer: Optimizer = Optimizer()
    """Optimizer of each stage."""
    shape: Shape = field(default_factory=Shape)
    """Shape of the model."""

    @property
    def drills(self) -> tuple[Drill, ...]:
        """All drills of the model."""
        return self.stages[-1].drills


RECIPES = {
    # Copying of words must be learnt first. In a mixture with all other drills, the actor does not
    # learn to combine advice with its observation.
    "tiny-actor": Recipe(
        "actor",
        (
            Stage((*webshop.COPY_DRILLS, *search_qa.COPY_DRILLS), 3),
            Stage(ACTOR_DRILLS, 3),
        ),
    ),
    # The context weight is low because chunks of a bank are random: learning to predict them is
    # useless.
    "tiny-extractor": Recipe("extractor", (Stage(EXTRACTOR_DRILLS, 8),), context_weight=0.3),
}
