"""GEM adapter with a stand-in for the package, and with gem-llm if it is installed.

The stand-in copies the awkward behaviour of the package. It draws from global generators that its
`reset` seeds, returns half of an observation in `info`, and configures logging.
"""

from __future__ import annotations

import importlib.util
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.config.load import load
from crl.envs.base import EnvSpec, StreamSettings
from crl.envs.registry import get_spec
from crl.errors import ConfigError
from crl.planning.tasks import specs
from crl.records.reader import read_episode_records
from crl.types import Task

INSTALLED = importlib.util.find_spec("gem") is not None

PACKAGE = {
    "__init__.py": """
import logging
from types import SimpleNamespace
from gem.envs.registration import ENV_REGISTRY
logging.basicConfig(level=logging.INFO)
def make(env_id):
    return ENV_REGISTRY[env_id]()
""",
    "utils/constants.py": 'TERMINAL_STATE = "<over>"\n',
    "utils/__init__.py": "",
    "envs/__init__.py": "",
    "envs/registration.py": """
import random
import numpy as np

class Dice:
    resets = 0

    def __init__(self):
        self.luck = random.random()

    def reset(self, seed=None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        self.resets += 1
        self.left = 3
        return f"Dice {random.random():.3f} {self.luck:.3f} {self.resets}", {"suffix": "Roll!"}

    def step(self, action):
        self.left -= 1
        if "boxed{roll}" not in action:
            return "?", -0.1, True, False, {}
        value = random.randrange(6) + int(np.random.randint(6))
        if value >= 8:
            return "<over>", 1.0, True, False, {}
        return f"{value}", 0.0, False, self.left == 0, {"suffix": "again"}

def broken():
    raise LookupError("no\\nwords")

ENV_REGISTRY = {"game:Dice-v0": Dice, "game:Broken-v0": broken}
""",
}


@pytest.fixture(scope="module", autouse=True)
def _stand_in(tmp_path_factory: pytest.TempPathFactory):
    """Replace the package with the stand-in, whether or not the package is installed."""
    root = tmp_path_factory.mktemp("site")
    for name, text in PACKAGE.items():
        path = root / "gem" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "gem"]:
            patch.delitem(sys.modules, name)
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "gem"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def dice() -> EnvSpec:
    return get_spec("gem:game:Dice-v0")


def tasks(spec: EnvSpec, n: int) -> tuple[Task, ...]:
    return spec.tasks.eval_tasks("unseen", n, 0, StreamSettings())


def transcript(spec: EnvSpec, task: Task) -> list:
    game = spec.make_game("full")
    lines: list = [game.reset(task)]
    while not getattr(lines[-1], "done", False):
        lines.append(game.step("\\boxed{roll}"))
    return lines


def test_a_task_file_can_name_a_gem_environment(tmp_path: Path):
    path = tmp_path / "dice.toml"
    path.write_text(
        'env = "gem:game:Dice-v0"\nrendering = "full"\nmax_turns = 3\n'
        "max_response_tokens = 64\n[eval]\nseen = 0\nunseen = 4\n"
    )
    spec = specs(load([str(path)]))["dice"]
    assert (spec.name, spec.runtime.hosting, spec.tasks.query_with_observation) == (
        "gem:game:Dice-v0",
        "processes",
        True,
    )
    assert pickle.loads(pickle.dumps(spec.make_game))("full").reset(tasks(spec, 1)[0]), (
        "workers import it by name"
    )


def test_an_unknown_id_and_an_environment_that_cannot_be_created():
    with pytest.raises(
        ConfigError,
        match=(
            r"^tasks.x.env = 'gem:game:Dise-v0': .* no such environment. "
            r"Did you mean game:Dice-v0 or"
        ),
    ):
        get_spec("gem:game:Dise-v0", "tasks.x.env")
    broken = get_spec("gem:game:Broken-v0")
    with pytest.raises(
        ConfigError,
        match=r"^env = 'gem:game:Broken-v0': cannot be created \(LookupError: no words\)\. Install",
    ):
        broken.make_game("full").reset(tasks(broken, 1)[0])


def test_texts_rewards_and_valid_actions(dice: EnvSpec):
    seen = [line for task in tasks(dice, 40) for line in transcript(dice, task)]
    texts = [line for line in seen if isinstance(line, str)]
    results = [line for line in seen if not isinstance(line, str)]
    assert all(text.endswith("\nRoll!") for text in texts), "the suffix is part of the observation"
    won = [result for result in results if result.success]
    assert {(result.text, result.reward, result.done, result.valid) for result in won} == {
        ("The episode is over.", 1.0, True, True)
    }
    assert {(result.reward, result.success) for result in results if not result.success} == {
        (0.0, False)
    }
    assert any(result.done and not result.success for result in results), (
        "a truncated episode is also done"
    )
    game = dice.make_game("full")
    game.reset(tasks(dice, 1)[0])
    assert game.step("I could say \\boxed{roll}. <answer>\\boxed{no}</answer>").valid is False, (
        "only the answer counts"
    )
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("\\boxed{roll}")


@given(order=st.lists(st.integers(0, 2), max_size=20), draws=st.lists(st.booleans(), max_size=20))
def test_interleaved_games_do_not_affect_each_other(
    dice: EnvSpec, order: list[int], draws: list[bool]
):
    alone = [transcript(dice, task) for task in tasks(dice, 3)]
    games = [dice.make_game("full") for _ in alone]
    for game in games:
        game.reset(tasks(dice, 9)[8])  # an earlier episode has no effect
    seen: list[list] = [
        [game.reset(task)] for game, task in zip(games, tasks(dice, 3), strict=True)
    ]
    outside = random.Random(1)
    random.seed(1)
    for number in [*order, *([0, 1, 2] * 3)]:
        if len(seen[number]) < len(alone[number]):
            seen[number].append(games[number].step("\\boxed{roll}"))
        if draws and draws[number % len(draws)]:
            assert random.random() == outside.random(), "draws outside the games are not affected"
    assert seen == alone


def test_games_in_threads_do_not_affect_each_other(dice: EnvSpec):
    expected = [transcript(dice, task) for task in tasks(dice, 24)]
    seen: dict[int, list] = {}

    def play(numbers: range) -> None:
        for number in numbers:
            seen[number] = transcript(dice, tasks(dice, 24)[number])

    threads = [threading.Thread(target=play, args=(range(first, 24, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[number] for number in range(24)] == expected


def test_the_global_generators_are_restored(dice: EnvSpec):
    random.seed(2)
    np.random.seed(2)
    expected = random.random(), np.random.random()
    random.seed(2)
    np.random.seed(2)
    transcript(dice, tasks(dice, 1)[0])
    assert (random.random(), np.random.random()) == expected


def test_the_import_does_not_change_logging():
    code = (
        "import logging; from crl.envs.registry import get_spec; get_spec('gem:game:Dice-v0'); "
        "print(logging.getLogger().handlers)"
    )
    site = next(path for path in sys.path if (Path(path) / "gem" / "__init__.py").is_file())
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {site!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


real = pytest.mark.skipif(not INSTALLED, reason="gem-llm is not installed: pip install 'crl[gem]'")


@real
def test_the_real_package():
    code = """
from crl.envs.base import StreamSettings
from crl.envs.registry import get_spec
for name in ("game:GuessTheNumber-v0-easy", "game:Mastermind-v0-easy",\
 "game:Minesweeper-v0-easy", "rg:leg_counting"):
    spec = get_spec(f"gem:{name}")
    one, other = spec.make_game("full"), spec.make_game("full")
    for task in spec.tasks.eval_tasks("unseen", 3, 0, StreamSettings()):
        assert one.reset(task) == (other.reset(task), other.reset(task))[1]
        assert one.step("<answer>\\\\boxed{1 2 3 4}</answer>") == other.step("\\\\boxed{1 2 3 4}")
number = get_spec("gem:game:GuessTheNumber-v0-easy")
game = number.make_game("full")
game.reset(number.tasks.eval_tasks("unseen", 1, 0, StreamSettings())[0])
assert [r.success for r in [game.step("no")]] == [False]
won = 0
for guess in range(1, 11):
    game.reset(number.tasks.eval_tasks("unseen", 1, 0, StreamSettings())[0])
    result = game.step(f"\\\\boxed{{{guess}}}")
    assert result.valid
    won += result.success
assert won == 1
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


GUESS = """
env = "gem:game:GuessTheNumber-v0-easy"
rendering = "full"
max_turns = 3
max_response_tokens = 8

[eval]
seen = 0
unseen = 4
"""


@real
def test_a_run_trains_on_the_real_package(tmp_path: Path):
    (tmp_path / "guess.toml").write_text(GUESS)
    run = tmp_path / "run"
    arguments = [
        "train",
        "--tasks",
        str(tmp_path / "guess.toml"),
        "--method",
        "grpo",
        "--steps",
        "2",
        "--run-dir",
        str(run),
        "--plain",
    ]
    code = "import sys; from crl.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--set", "rollout.groups=2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    episodes = list(read_episode_records(run))
    assert len(episodes) == 2 * 16
    assert {(episode["task"], episode["error"]) for episode in episodes} == {("guess", None)}
    assert all(1 <= episode["turns"] <= 3 for episode in episodes)
    observations = [
        next(segment["text"] for segment in episode["segments"] if segment["origin"] == "env")
        for episode in episodes
    ]
    assert all(text.startswith("You are playing Guess The Number.") for text in observations)
    assert (
        len(
            {
                segment["text"]
                for episode in episodes
                for segment in episode["segments"]
                if segment["origin"] == "policy"
            }
        )
        > 4
    )
