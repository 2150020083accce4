"""Tasks of a user: environments in the user's own file, mixtures, streams of seeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from crl.cli.play import PlayableTask
from crl.config import catalog
from crl.config.load import dump, load, load_saved
from crl.envs import registry
from crl.envs.base import EnvSpec, StreamSettings
from crl.envs.seeded import TRAIN_SEEDS, UNSEEN_SEEDS, SeededTasks
from crl.errors import ConfigError
from crl.planning.context import chat_context
from crl.planning.plan import plan
from crl.planning.preflight import require, require_compatible_extractor
from crl.planning.tasks import first_tasks, specs
from crl.types import Observation, Task
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
DOORS = EXAMPLES / "doors" / "doors.toml"

OWN_SOURCE = """
from dataclasses import replace
from crl.envs.base import ActionSpace, EnvSpec, EnvTasks, Runtime
SPEC = EnvSpec("own", lambda rendering: None, EnvTasks(lambda seed, s: None, lambda *a: ()), \
ActionSpace(description="any text"), turns=1)
WORKERS = replace(SPEC, runtime=Runtime("processes"))
"""
TASK_FILE = 'env = "own.py:{}"\nrendering = "compact"\nmax_turns = 1\nmax_response_tokens = 4\n'


def config_error(*tasks: str, sets: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        specs(load(tasks, sets=sets))
    return str(caught.value)


def own_task(folder: Path, attribute: str = "SPEC", source: str = OWN_SOURCE) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(source)
    (folder / "own.toml").write_text(TASK_FILE.format(attribute))
    return str(folder / "own.toml")


# ── an environment in a file ──────────────────────────────────────────────────────────────────────


def test_the_example_is_a_valid_task():
    config = load([str(DOORS)])
    spec = specs(config)["doors"]
    assert config.tasks["doors"].max_turns == spec.turns
    assert spec.curriculum.scripted_player is None
    assert plan(config).splitlines()[0] == "── resolved config ──"
    game = spec.make_game("compact")
    for task in spec.tasks.eval_tasks("unseen", 8, 0, StreamSettings()):
        tried = []
        for door in spec.actions.choices:
            game.reset(task)
            assert not game.step("no door").valid
            tried.append(game.step(f"<answer>{door}</answer>").success)
        assert tried.count(True) == 1


def test_the_prompt_lists_the_choices_of_actions_without_a_description():
    task = PlayableTask.load(str(DOORS), "full")
    context = chat_context({"doors": task.config}, {"doors": task.spec})
    drawn = first_tasks("doors", task.config, task.spec, "unseen", 1, 0)[0]
    prompt, *_ = context.opening(drawn, Observation("eight doors, all shut."), [])
    assert ", ".join(task.spec.actions.choices) in prompt.text
    assert not task.spec.actions.description


def test_the_documentation_quotes_the_example():
    code = (
        (EXAMPLES / "doors" / "doors.py")
        .read_text("utf-8")
        .partition("from crl.types import StepResult\n\n")[2]
    )
    shown = indent(code.strip().replace("\n\n\n", "\n\n"), "    ")
    assert f"\n\n{shown}\n\n" in (EXAMPLES.parent / "docs" / "tasks.md").read_text("utf-8")
    game = code[code.index("class Doors") : code.index("def digest")]
    assert len([line for line in code.splitlines() if line]) <= 30
    assert len([line for line in game.splitlines() if line]) <= 12


def test_the_path_of_an_environment_is_saved_as_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load(["own.toml"])
    assert config.tasks["own"].env == f"{tmp_path / 'own.py'}:SPEC"
    dump(config, tmp_path / "config.json")
    monkeypatch.chdir("/")
    spec = specs(load_saved(tmp_path).config)["own"]
    assert isinstance(spec, EnvSpec)
    assert registry.get_spec(config.tasks["own"].env) is spec, "the file runs once a process"


def test_the_path_of_an_environment_may_start_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = own_task(tmp_path / "tasks")
    (tmp_path / "tasks" / "own.py").rename(tmp_path / "mine.py")
    for path, sets in (("~/mine.py", ()), ("gone.py", ("tasks.own.env=~/mine.py:SPEC",))):
        (tmp_path / "tasks" / "own.toml").write_text(
            TASK_FILE.format("SPEC").replace("own.py", path)
        )
        assert specs(load([own], sets=sets))["own"].name == "own"
    assert "~stranger/mine.py:SPEC': there is no such file." in config_error(
        own, sets=["tasks.own.env=~stranger/mine.py:SPEC"]
    )


def test_two_files_with_the_same_name_are_two_environments(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
        own_task(tmp_path / name)
    first, second = (registry.get_spec(f"{tmp_path / name / 'own.py'}:SPEC") for name in "ab")
    assert first is not second


def test_errors_in_the_file_of_an_environment(tmp_path: Path):
    own = own_task(tmp_path, "NOBODY")
    assert "'NOBODY' of" in config_error(own)
    assert "is not an EnvSpec. See examples/doors for an example." in config_error(own)
    text = config_error(own_task(tmp_path, "WORKERS"))
    assert (
        "its hosting is 'processes', but worker processes cannot import an environment from "
        "a file. Move it to a module" in text
    )
    assert "its module cannot be imported (ZeroDivisionError: " in config_error(
        own_task(tmp_path / "b", source="1 / 0")
    )
    assert "its module cannot be imported (SystemExit: no key)" in config_error(
        own_task(tmp_path / "c", source="exit('no key')")
    )
    (tmp_path / "b" / "own.py").unlink()
    text = config_error(str(tmp_path / "b" / "own.toml"))
    assert (
        f"tasks.own.env = '{tmp_path / 'b' / 'own.py'}:SPEC': there is no such file. "
        "A relative path in a task file" in text
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "actions=ActionSpace(['up', 'down'])",
            "ValueError: choices of actions must be a tuple of strings, which is empty if actions "
            "are free text, not ['up', 'down']",
        ),
        (
            "actions=ActionSpace('up')",
            "ValueError: choices of actions must be a tuple of strings, which is empty if actions "
            "are free text, not 'up'",
        ),
        (
            "actions=ActionSpace((1, 2))",
            "ValueError: choices of actions must be a tuple of strings, which is empty if actions "
            "are free text, not (1, 2)",
        ),
        (
            "actions=ActionSpace()",
            "ValueError: actions that are free text need a description",
        ),
        (
            "actions=('up', 'down')",
            "ValueError: own: actions must be an ActionSpace, not ('up', 'down')",
        ),
        ("tasks=None", "ValueError: own: tasks must be an EnvTasks, not None"),
        (
            "runtime=Runtime('fork')",
            "ValueError: hosting must be threads or processes, not 'fork'",
        ),
        (
            "runtime=Runtime(['threads'])",
            "ValueError: hosting must be threads or processes, not ['threads']",
        ),
        ("turns=0", "ValueError: own: turns must be at least 1, not 0"),
        (
            "hosting='threads'",
            "TypeError: EnvSpec.__init__() got an unexpected keyword argument 'hosting'",
        ),
    ],
)
def test_invalid_declarations_of_an_environment(tmp_path: Path, change: str, words: str):
    source = f"{OWN_SOURCE}SPEC = replace(SPEC, {change})\n"
    assert f"its module cannot be imported ({words}). " in config_error(
        own_task(tmp_path, source=source)
    )


def test_environments_are_hashable_with_unhashable_fields():
    spec = replace(registry.get_spec("room"), reward_range=[0.0, 1.0])  # type: ignore[arg-type]
    assert len({spec, replace(spec), spec}) == 2


MISCOUNTING_SOURCE = """
from dataclasses import replace
from crl.envs.room import SPEC as ROOM
RECORD = replace(ROOM.{record}, {function}=lambda *a: ROOM.{record}.{function}(*a)[1:])
SPEC = replace(ROOM, name="own", {record}=RECORD)
"""


@pytest.mark.parametrize(
    ("record", "function", "key", "n"),
    [
        ("tasks", "eval_tasks", "seen", 9),
        ("tasks", "eval_tasks", "unseen", 8),
        ("tasks", "eval_tasks", "online_places", 7),
        ("curriculum", "probe_tasks", "probe_places", 6),
    ],
)
def test_an_environment_that_returns_the_wrong_number_of_tasks(
    tmp_path: Path, record: str, function: str, key: str, n: int
):
    own = own_task(tmp_path, source=MISCOUNTING_SOURCE.format(record=record, function=function))
    sizes = dict.fromkeys(("seen", "unseen", "online_places", "probe_places"), 0) | {key: n}
    with pytest.raises(ConfigError) as caught:
        require(load([own], sets=[f"tasks.own.eval.{name}={size}" for name, size in sizes.items()]))
    message = (
        f"its {function} returned {n - 1} tasks, but {n} were requested. Fix {function}: return "
        "as many as requested, or raise a ValueError that says how many"
    )
    assert str(caught.value).startswith(f"tasks.own.env = '{tmp_path / 'own.py'}:SPEC': {message}")


def test_a_file_is_read_again_after_it_was_fixed(tmp_path: Path):
    own = own_task(tmp_path, source="1 / 0")
    config_error(own)
    own_task(tmp_path)
    assert specs(load([own]))["own"].name == "own"


def test_an_extra_that_is_not_installed_is_named(tmp_path: Path):
    text = config_error(
        own_task(
            tmp_path,
            source=f"{OWN_SOURCE}SPEC = replace(SPEC, runtime=Runtime(extra='no_such_extra'))\n",
        )
    )
    assert (
        "it needs the extra 'no_such_extra', which is not installed. "
        "Run pip install 'crl[no_such_extra]'." in text
    )


# ── renderings ────────────────────────────────────────────────────────────────────────────────────

SIZES = "max_turns = 1\nmax_response_tokens = 4\n"
VALUES = (
    "(Rendering of observations: full = text for language models, compact = few tokens for tiny "
    "models. Tiny models use the value in the table [compact] of the task's file)."
)


def rendering_task(folder: Path, settings: str, sizes: str = SIZES) -> str:
    own = own_task(folder)
    Path(own).write_text(f'env = "own.py:SPEC"\n{sizes}{settings}\n')
    return own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", f"tasks.own.rendering = None: is missing. Add it to {{path}} {VALUES}"),
        (
            'rendering = "tiny"',
            "tasks.own.rendering = 'tiny': should be 'full' or 'compact'. "
            f"Correct it in {{path}} {VALUES}",
        ),
        (
            'rendering = "full"\n[compact]\nrendering = "tiny"',
            "tasks.own.compact.rendering = 'tiny': should be 'full' or 'compact'. "
            f"Correct it in {{path}} {VALUES}",
        ),
        (
            'rendering = "full"\ncompact = "compact"',
            "tasks.own.compact = 'compact': is not a table. Write [compact] and its settings in "
            "{path}.",
        ),
        (
            'rendering = "full"\n[compct]\nmax_turns = 3',
            "tasks.own.compct = {{'max_turns': 3}}: is not a table of a task (from {path}). "
            "Did you mean compact? Available: stream, eval, search, compact. Write settings for "
            "tiny models in [compact].",
        ),
        (
            'rendering = "full"\n[tiny]\nmax_turns = 3',
            "tasks.own.tiny = {{'max_turns': 3}}: is not a table of a task (from {path}). "
            "Available: stream, eval, search, compact. Write settings for tiny models in "
            "[compact].",
        ),
    ],
)
def test_errors_about_renderings_name_the_values_and_the_table(
    tmp_path: Path, settings: str, message: str
):
    own = rendering_task(tmp_path, settings)
    assert config_error(own) == message.format(path=own)


@pytest.mark.parametrize("table", ["", "[compact]\nmax_turns = 2"])
def test_a_tiny_extractor_needs_the_compact_rendering(tmp_path: Path, table: str):
    own = rendering_task(tmp_path, f'rendering = "full"\n{table}')
    with pytest.raises(ConfigError) as caught:
        require_compatible_extractor(load([own]))
    assert str(caught.value) == (
        "extractor.model = 'tiny-extractor': reads only the compact rendering, but "
        "tasks.own.rendering is full. Set tasks.own.rendering to compact, with --set or in the "
        "table [compact] of the task's file."
    )


def test_a_tiny_extractor_needs_a_tiny_actor(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")  # a model directory with the full profile
    with pytest.raises(ConfigError) as caught:
        require_compatible_extractor(load(["room"], sets=[f"actor.model={tmp_path}"]))
    assert str(caught.value).endswith(
        "reads only the compact rendering, but tasks.room.rendering is full. "
        "Use a language model as extractor, or a tiny model as actor."
    )


def test_an_answer_that_is_too_long_for_tiny_models_names_the_table(tmp_path: Path):
    sizes = SIZES.replace("4", "1024")
    assert config_error(rendering_task(tmp_path, 'rendering = "full"', sizes)) == (
        "tasks.own.max_response_tokens = 1024: leaves no tokens for the prompt: "
        "actor.max_context_tokens is 1024. Lower it, or raise actor.max_context_tokens. Write "
        "settings for tiny models in [compact] of the task's file."
    )


def test_the_table_compact_cannot_be_changed_by_set(tmp_path: Path):
    own = rendering_task(tmp_path, 'rendering = "compact"')
    for value in ("compact.max_turns=3", "compact=3"):
        assert (
            "is a table of the task's file, and cannot be set by --set or in a preset. "
            "Set the keys of tasks.own: they apply to the model of the run."
        ) in config_error(own, sets=[f"tasks.own.{value}"])


def test_the_compact_rendering_of_a_task_without_it_cannot_be_played(tmp_path: Path):
    own = rendering_task(tmp_path, 'rendering = "full"')
    with pytest.raises(ConfigError) as caught:
        PlayableTask.load(own, "compact")
    assert str(caught.value) == (
        f"--rendering = 'compact': {own} has only the rendering full. Play with --rendering full, "
        'or write rendering = "compact" in its table [compact].'
    )
    assert PlayableTask.load(own, "full").config.rendering == "full"
    compact_only = rendering_task(tmp_path, 'rendering = "compact"')
    assert PlayableTask.load(compact_only, "full").config.rendering == "compact"


# ── mixtures ──────────────────────────────────────────────────────────────────────────────────────


def mixture(folder: Path, text: str, *tasks: str) -> str:
    for name in tasks:
        shutil.copy(catalog.task_file("room"), folder / f"{name}.toml")
    (folder / "mixed.toml").write_text(text)
    return str(folder / "mixed.toml")


def test_a_mixture_changes_the_settings_of_its_tasks(tmp_path: Path):
    text = (
        'tasks = ["room", "hall.toml", "cave.toml"]\n[hall]\nmax_turns = 9\n'
        "[cave]\nmax_turns = 8\n[cave.compact]\nmax_turns = 3\n"
    )
    config = load([mixture(tmp_path, text, "hall", "cave")])
    assert {name: task.max_turns for name, task in config.tasks.items()} == {
        "room": 4,
        "hall": 4,
        "cave": 3,
    }
    assert (
        "a step    16 groups × 8 members = 128 rollouts, at most 1 step ahead; "
        "5 or 6 groups of each task" in plan(config).splitlines()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'tasks = ["room", "chess"]',
            "tasks = 'chess': is listed in mixed.toml, but is not a known task.",
        ),
        (
            'tasks = ["room", "gone.toml"]',
            "tasks = 'gone.toml': is listed in mixed.toml, but there is no such file.",
        ),
        (
            'tasks = ["mixed.toml"]',
            "tasks = 'mixed.toml': is listed in mixed.toml, but is itself a mixture.",
        ),
        ('tasks = ["room", "room"]', "contains room twice"),
        ("tasks = []", "tasks = []: is not a list of tasks"),
        ("tasks = [3]", "tasks = [3]: is not a list of tasks"),
        (
            'tasks = ["room"]\nmax_turns = 3',
            "tasks.max_turns = 3: is not a table for one of the tasks",
        ),
        (
            'tasks = ["room"]\n[hall]\nmax_turns = 3',
            "tasks.hall = {'max_turns': 3}: is not a table for one of the tasks",
        ),
        ('tasks = ["room"]\n[room]\nturnz = 3', "tasks.room.turnz = 3: is not a setting"),
    ],
)
def test_errors_in_a_mixture(tmp_path: Path, text: str, words: str):
    assert words in config_error(mixture(tmp_path, text))


# ── streams of seeds ──────────────────────────────────────────────────────────────────────────────


def test_seeded_tasks_are_fixed_and_disjoint_from_the_train_stream():
    tasks, settings = SeededTasks("dice", "Roll a six."), StreamSettings()
    first, second = tasks.stream(3, settings), tasks.stream(3, settings)
    drawn = [*first.draw(4), *first.draw(60)]
    assert drawn == list(second.draw(64))
    assert drawn != list(tasks.stream(4, settings).draw(64))
    assert len({task.seed for task in drawn}) == 64
    assert all(task.seed in TRAIN_SEEDS and task.split == "train" for task in drawn)
    unseen = tasks.eval_tasks("unseen", 32, 0, settings)
    assert unseen == tasks.eval_tasks("unseen", 64, 9, settings)[:32]
    assert all(task.seed in UNSEEN_SEEDS for task in unseen)
    with pytest.raises(ValueError, match="dice has no persistent places"):
        tasks.eval_tasks("seen", 1, 0, settings)


def test_a_stream_of_seeds_continues_from_its_state():
    source = SeededTasks("dice", "Roll a six.").stream(0, StreamSettings())
    source.draw(5)
    state = json.loads(json.dumps(source.state()))
    expected: list[Task] = list(source.draw(3))
    source.load_state(state)
    assert list(source.draw(3)) == expected
