"""Method of a run, built from its config."""

from __future__ import annotations

from collections.abc import Mapping

from crl import plugins
from crl.config.schema import RunConfig
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.planning import tasks
from crl.planning.context import chat_context
from crl.protocols import Method
from crl.types import Task


def build_method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    """Return the method of a run.

    Raise `ConfigError` if `build` returns no method, or one that contradicts its spec.
    """
    context = chat_context(
        config.tasks, specs, config.prompts.files,
        can_ask=config.ask.enabled, retrieve_by_goal=config.bank.key_text_weight is not None,
    )  # fmt: skip
    method = config.spec.build(config, config.method_settings, context)
    if reason := _contradiction(config, method):
        raise ConfigError("method", config.method, reason, "Correct its SPEC or its build")
    return method


def _contradiction(config: RunConfig, method: object) -> str:
    """Return why a built method cannot be run, or "" if it can."""
    if not isinstance(method, Method):
        return f"its build returned {type(method).__name__}, not a crl.protocols.Method"
    if config.with_extractor != (method.distiller is not None):
        return (
            f"its SPEC uses {'an' if config.with_extractor else 'no'} extractor, but the distiller "
            f"of its Method is {'None' if method.distiller is None else 'set'}"
        )
    if config.trains_extractor != (method.extractor is not None):
        return (
            f"the extractor {'is' if config.trains_extractor else 'is not'} trained according to "
            "the config, but the extractor of its Method is "
            f"{'None' if method.extractor is None else 'set'}"
        )
    members = config.rollout.group_size
    task = Task(next(iter(config.tasks)), seed=0, split="train", goal="")
    plans = method.planner.plan(task, members, 0)
    guided = sum(plan.condition == "guided" for plan in plans)
    if guided != config.guided_members:
        return (
            f"its SPEC guides {config.guided_members} of {members} members (guided_members), but "
            f"its planner guides {guided}"
        )
    return ""


def require_method(config: RunConfig) -> None:
    """Raise `ConfigError` if an own method cannot be built, or cannot run with these learners.

    Bundled methods are not built, because that would import torch.
    """
    if not plugins.is_reference(config.method):
        return
    method = build_method(config, tasks.specs(config))
    roles = [method.actor, *([method.extractor] if method.extractor else [])]
    if not LEARNERS[config.learner.kind].in_process and any(
        plugins.is_from_file(role.loss) for role in roles
    ):
        raise ConfigError(
            "method",
            config.method,
            f"learner.kind is {config.learner.kind}, but other processes cannot import its loss "
            "from a file",
            "Move it to a module on PYTHONPATH, and name it package.module:SPEC",
        )
