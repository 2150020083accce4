"""Own methods: the example of docs/methods.md, and errors of specs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crl.config import load, load_saved
from crl.config.load import dump
from crl.errors import ConfigError
from crl.planning.methods import require_method
from crl.records.reader import read_episode_records
from support.pages import code
from support.paths import ROOT

PAGE = ROOT / "docs" / "methods.md"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return the file of the example of docs/methods.md."""
    text = code(PAGE, '"""GRPO with a cost for each turn."""')
    (path := tmp_path / "turn_cost.py").write_text(text)
    return path


def error(method: str, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(["room"], options={"method": method}, sets=sets)
    return str(caught.value)


def test_the_page_shows_the_code_of_grpo():
    assert (ROOT / "crl" / "methods" / "grpo.py").read_text("utf-8") in PAGE.read_text("utf-8")


def test_an_own_method_has_its_own_section(example: Path, tmp_path: Path):
    config = load(["room"], options={"method": f"{example}:SPEC"}, sets=["turn_cost.cost=0.02"])
    assert config.method_settings.cost == 0.02
    assert not config.with_extractor
    dump(config, tmp_path / "config.json")
    assert load_saved(tmp_path).config == config


def test_settings_of_an_own_method_are_checked(example: Path):
    method = f"{example}:SPEC"
    assert "turn_cost.cost = 'much': should be a valid number" in error(
        method, "turn_cost.cost=much"
    )
    assert "turn_cost.costs = 1: is not a setting" in error(method, "turn_cost.costs=1")
    assert "turn_cost.cost = 1: is not a setting" in error("grpo", "turn_cost.cost=1")


def test_the_probe_of_a_method_that_does_not_use_it(tmp_path: Path):
    (path := tmp_path / "own.py").write_text(STEPS_METHOD)
    assert "the method steps does not use the advice probe" in error(
        f"{path}:SPEC", "eval.probe_every=5"
    )


def test_a_method_without_a_bank_names_settings_without_effect(example: Path):
    setting = "    cost: float = 0.01\n"
    hook = "    def unused_reason(self, config, name):\n        return name, 'Leave it out'\n"
    text = example.read_text().replace(setting, setting + hook)
    example.write_text(text)
    assert "turn_cost.cost = 1: has no effect because cost. Leave it out." in error(
        f"{example}:SPEC", "turn_cost.cost=1"
    )


def test_a_bundled_methods_settings_do_not_hinder_another(example: Path):
    share = "complementary.guided_share=0.25"
    assert load(["room"], options={"method": f"{example}:SPEC"}, sets=[share])
    assert "complementary.share = 1: is not a setting" in error("grpo", "complementary.share=1")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("", "'SPEC' of '{path}' is not a MethodSpec. See crl/methods/grpo.py for an example."),
        ("1 / 0", "its module cannot be imported (ZeroDivisionError: division by zero)."),
        (
            "from crl.config.method import MethodSpec\nSPEC = MethodSpec('actor', print)",
            "its name 'actor' is the name of a part of the configuration. Rename the method.",
        ),
        *(
            (f"from crl.config.method import MethodSpec\nSPEC = MethodSpec({arguments})", text)
            for arguments, text in [
                ("'guided_members', print", "'guided_members' is the name of a part of the conf"),
                ("'My.method', print", "method = 'My.method': its name must begin with a letter"),
                ("'m', print, uses=frozenset({'gym'})", "it uses gym, which no run has"),
                (
                    "'m', print, uses=frozenset({'extractor'})",
                    "an extractor needs a bank",
                ),
            ]
        ),
        (
            "from crl.config.method import MethodSection, MethodSpec\n"
            "class S(MethodSection):\n    cost: float\n"
            "SPEC = MethodSpec('m', print, S)",
            "method = 'm': a setting of S has no default. Correct the MethodSpec.",
        ),
        (
            "from crl.config.method import MethodSpec\n"
            "from crl.config.section import Section\n"
            "SPEC = MethodSpec('m', print, Section)",
            "Section is not a crl.config.method.MethodSection",
        ),
    ],
)
def test_specs_that_cannot_be_used(tmp_path: Path, code: str, text: str):
    (path := tmp_path / "own.py").write_text(code)
    assert text.format(path=path) in error(f"{path}:SPEC")


@pytest.mark.parametrize(
    ("change", "sets", "text"),
    [
        ("return 3", (), "its build returned int, not a crl.protocols.Method"),
        ("1 / 0", (), "its build raised ZeroDivisionError at {path}:48: division by zero"),
        (
            "return replace(method, planner=None)",
            ("extractor.train=false",),
            "its planner raised AttributeError: 'NoneType' object has no attribute 'plan'",
        ),
        (
            "return replace(method, planer=None)",
            (),
            "its build raised TypeError at {path}:48: ",
        ),
        ("raise SystemExit(3)", (), "its build raised SystemExit at {path}:48: 3."),
        (
            "return replace(method, actor=None)",
            ("extractor.train=false",),
            "the actor of its Method is of type NoneType, not a crl.protocols.TrainSpec",
        ),
        (
            "planner = type('P', (), {'plan': lambda *a: method.planner.plan(*a[1:])[:5]}); "
            "return replace(method, planner=planner())",
            ("extractor.train=false",),
            "its planner returned 5 plans for a group of 8 members",
        ),
        (
            "return replace(method, distiller=None)",
            (),
            "uses a bank, but the distiller of its",
        ),
        (
            "return method",
            (),
            "the extractor is trained according to the config, but the extractor",
        ),
        (
            "return replace(method, planner=GuidedShare(0.25))",
            ("extractor.train=false",),
            "its SPEC guides 4 of 8 members (guidance), but its planner guides 2",
        ),
        (
            "return replace(method, actor=replace(actor, loss=StepAdvantage()))",
            ("extractor.train=false", "learner.kind=deepspeed"),
            "other processes cannot import its loss from a file. Move it to a module on PYTHONPATH",
        ),
        (
            "from functools import partial; "
            "return replace(method, actor=replace(actor, loss=partial(StepAdvantage())))",
            ("extractor.train=false", "learner.kind=deepspeed"),
            "other processes cannot import its loss from a file",
        ),
        (
            "return replace(method, actor=replace(actor, loss=lambda logprobs: None))",
            ("extractor.train=false", "learner.kind=deepspeed"),
            "Define the loss as a class at the top level of a module.",
        ),
    ],
)
def test_methods_that_contradict_their_spec(
    tmp_path: Path, change: str, sets: tuple[str, ...], text: str
):
    code = STEPS_METHOD.replace("return Method(", "method = Method(").replace(
        "\n\n\nSPEC", f"\n    {change}\n\n\nSPEC"
    )
    (path := tmp_path / "own.py").write_text(code)
    config = load(["room"], options={"method": f"{path}:SPEC"}, sets=sets)
    with pytest.raises(ConfigError) as caught:
        require_method(config)
    assert text.format(path=path) in str(caught.value)


def test_references_that_do_not_exist(tmp_path: Path):
    assert "there is no such file" in error(f"{tmp_path / 'none.py'}:SPEC")
    assert "there is no module 'no.such.module'" in error("no.such.module:SPEC")
    assert "is not a method. Did you mean grpo?" in error("gpro")


STEPS_METHOD = """
from dataclasses import dataclass

from crl.config.method import Guidance, MethodSpec
from crl.protocols import PerTurn
from crl.types import GUIDANCE_ORIGINS, STEP_START


@dataclass(frozen=True)
class StepAdvantage:
    def __call__(self, trajectories):
        from crl.algo import discounted_returns, step_advantages

        returns = [discounted_returns(t.turn_rewards, 0.9).tolist() for t in trajectories]
        flat = step_advantages(
            [value for values in returns for value in values],
            [t.group for t in trajectories for _ in range(t.turns)],
            [text for t in trajectories for text in t.turn_states],
        ).tolist()
        values = iter(flat)
        return PerTurn([[next(values) for _ in range(t.turns)] for t in trajectories])


@dataclass(frozen=True)
class StrippedView:
    def __call__(self, trajectory, rerender):
        if trajectory.condition == "free":
            return trajectory.traces
        return rerender.without(trajectory, GUIDANCE_ORIGINS, version=STEP_START)


def build(config, settings, context):
    from dataclasses import replace

    from crl.methods.parts.distilling import EveryEpisode
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import GroupAdvantage, actor_role
    from crl.protocols import Method

    actor = actor_role(config.actor, GroupAdvantage("std"), StepAdvantage())
    return Method(
        planner=GuidedShare(0.5),
        context=context,
        shaper=OutcomeReward(),
        actor=replace(actor, view=StrippedView()),
        distiller=EveryEpisode(),
    )


SPEC = MethodSpec(
    "steps",
    build,
    uses=frozenset({"bank", "extractor"}),
    guidance=Guidance(lambda settings, members: members // 2),
)
"""


def test_step_advantages_and_views_without_guidance(tmp_path: Path):
    """Train with the step term of GiGPO, and with guided episodes after unguided prompts."""
    (method := tmp_path / "steps.py").write_text(STEPS_METHOD)
    run = tmp_path / "run"
    # The first step builds the bank, so the second step has guided episodes.
    places = ("tasks.room.stream.places=1", "tasks.room.stream.permanent=1")
    train(
        run,
        f"{method}:SPEC",
        *("run.deterministic=true", "rollout.max_staleness=0", "extractor.train=false"),
        *places,
        steps=3,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert sum(line["actor/updates"] for line in steps) >= 2
    # Log-probs of the learner at the start of the step: the ratio of its first update is 1.
    assert all(line["actor/grad_norm"] > 0 for line in steps if line["actor/updates"])
    assert any(episode["used"] for episode in read_episode_records(run))


def train(run: Path, method: str, *sets: str, steps: int) -> None:
    sizes = ("seen", "unseen", "online_places")
    sets = (
        *("rollout.groups=2", "rollout.group_size=4", "eval.probe_every=0"),
        *(f"tasks.room.eval.{name}=0" for name in sizes),
        *sets,
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "crl", "train", "--tasks", "room", "--steps", str(steps)),
            *("--plain", "--method", method, "--run-dir", str(run)),
            *(word for text in sets for word in ("--set", text)),
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_own_method_trains(example: Path, tmp_path: Path):
    """Train one step with the example. Its reward channel must reach the training reward."""
    run = tmp_path / "run"
    train(run, f"{example}:SPEC", steps=1)
    for episode in read_episode_records(run):
        outcome = 1.0 if episode["success"] else 0.0
        assert episode["reward"] == pytest.approx(outcome - 0.01 * episode["turns"])
