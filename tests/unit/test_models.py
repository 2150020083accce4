"""The bundled models and the recipe that makes them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from crl.config.models import bundled_models, model_profile, model_size, resolve_model
from crl.envs.actions import COMPASS
from crl.envs.room import demonstration_tasks
from crl.envs.room.game import RoomGame
from crl.errors import ConfigError
from crl.modeling import load_model, load_tokenizer, stop_ids
from crl.models import recipe
from crl.models.drills import ACTOR_DRILLS, Drill, Explorer, Pacer, RoomWalks, Walker, first_step
from crl.models.warm_start import Schooling, Shape, demonstrated_trace, new_model, train_tokenizer
from crl.tokens import ChatRenderer
from crl.types import Segment


def renderer(path: Path) -> ChatRenderer:
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


def test_the_shipped_actor_is_what_the_recipe_makes() -> None:
    """Shape, drills and schooling beside the weights are those of the code: who changes one makes the model again."""
    path = resolve_model("tiny-actor")
    made = json.loads((path / "recipe.json").read_text("utf-8"))
    assert bundled_models() == ["tiny-actor"]
    assert model_profile(path) == "compact"
    assert made["shape"] == asdict(recipe.SHAPE)
    assert made["schooling"] == asdict(recipe.SCHOOLING)
    assert made["drills"] == {drill.name: drill.count for drill in ACTOR_DRILLS}
    size = model_size(path)
    assert size is not None
    assert size.bytes < 1_000_000


def test_a_demonstration_becomes_the_tokens_of_a_rollout(tiny_actor: Path) -> None:
    """By hand: the template's text, with the mask on each action and its stop token."""
    chat = renderer(tiny_actor)
    segments = [
        Segment("user", "Room: the jade attic.", "task"), Segment("user", "at 1 1", "env"), Segment("assistant", "south", "policy"),
        Segment("user", "at 2 1", "env"), Segment("assistant", "east", "policy"),
    ]  # fmt: skip
    trace = demonstrated_trace(segments, chat)
    assert chat.decode(trace.ids) == (
        "<|im_start|>user\nRoom: the jade attic.\nat 1 1<|im_end|>\n<|im_start|>assistant\nsouth<|im_end|>\n"
        "<|im_start|>user\nat 2 1<|im_end|>\n<|im_start|>assistant\neast<|im_end|>"
    )
    trained = [i for i, m in zip(trace.ids, trace.mask, strict=True) if m]
    assert chat.decode(trained) == "south<|im_end|>east<|im_end|>"


def test_the_tokenizer_that_is_loaded_is_the_one_that_was_taught(tmp_path: Path) -> None:
    """transformers picks a tokenizer's class by the model's type: a saved one of another kind would come back cutting text differently."""
    (drill,) = ACTOR_DRILLS
    demonstrations = list(drill.make(random.Random(0), 50))
    taught = train_tokenizer(demonstrations, vocabulary=400)
    new_model(Shape(vocabulary=400), taught, seed=0).save_pretrained(tmp_path)
    taught.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    texts = [s.text for d in demonstrations for s in d] + ["<|im_start|>user\nat 2 3\n<|im_end|>", "naïve 12345  \n\t x"]
    assert [loaded.encode(text) for text in texts] == [taught.encode(text) for text in texts]
    assert len(loaded) == len(taught) == load_model(tmp_path, torch.device("cpu")).config.vocab_size
    assert loaded.decode(loaded.encode(texts[-2])) == texts[-2]


def test_every_action_is_short_enough_for_a_turn(tiny_actor: Path) -> None:
    """tasks/room.toml allows 4 tokens a turn to compact models, the stop token included."""
    chat = renderer(tiny_actor)
    assert max(len(chat.encode(action)) for action in COMPASS) + 1 <= 4


def test_drills_repeat_and_hold_valid_actions() -> None:
    (drill,) = ACTOR_DRILLS
    first, again = (list(drill.make(random.Random(3), 20)) for _ in range(2))
    assert first == again
    actions = [s.text for demonstration in first for s in demonstration if s.origin == "policy"]
    assert set(actions) <= set(COMPASS)
    assert all(demonstration[-1].origin == "policy" for demonstration in first)


def test_personas_differ_as_they_should() -> None:
    """The explorer finds the exit far more often than the walker and the pacer; it goes straight to stairs that it sees."""

    def wins(persona: type[Explorer | Walker | Pacer]) -> int:
        walks = RoomWalks(((persona, 1.0),), slip=0.0, turns=6)
        game, rng, won = RoomGame("compact"), random.Random(0), 0
        for task in demonstration_tasks(60):
            game.reset(task)
            actor = walks.shares[0][0]()
            for _ in range(walks.turns):
                result = game.step(actor.act(game, rng))
                if result.done:
                    won += result.success
                    break
        game.close()
        return won

    explored, walked, paced = wins(Explorer), wins(Walker), wins(Pacer)
    assert explored >= 36  # a scripted explorer wins 58 % in 4 turns
    assert explored >= walked + 15
    assert walked > paced


def test_first_step_goes_around_a_trap() -> None:
    class Corridor:
        position = (0, 0)
        grid = ("@^>..", "..~~~", "~~~~~", "~~~~~", "~~~~~")

    step = first_step(Corridor(), {(2, 0)}, random.Random(0))  # pyright: ignore[reportArgumentType]
    assert step in ("southeast", "south")  # not east, onto the trap


def test_make_models_makes_a_loadable_model_and_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (drill,) = ACTOR_DRILLS
    monkeypatch.setattr(recipe, "ACTOR_DRILLS", (Drill(drill.name, 40, drill.make),))
    monkeypatch.setattr(recipe, "SCHOOLING", Schooling(epochs=1))
    recipe.make(tmp_path / "a", seed=1)
    recipe.make(tmp_path / "b", seed=1)
    made = tmp_path / "a" / "tiny-actor"
    assert (made / "model.safetensors").read_bytes() == (tmp_path / "b" / "tiny-actor" / "model.safetensors").read_bytes()
    assert renderer(made).stop_ids == (load_tokenizer(made).eos_token_id,)
    with pytest.raises(ConfigError, match="exists already"):
        recipe.make(tmp_path / "a", seed=1)
