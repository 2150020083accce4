"""Method of a run, built from its config."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from crl import plugins
from crl.config.schema import RunConfig
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.planning import tasks
from crl.planning.context import chat_context
from crl.protocols import Loss, Method
from crl.types import Task


def build_method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    """Return the method of a run.

    Raise `ConfigError` if an own method cannot be built, or if `build` returns no method, or one
    that contradicts its spec.
    """
    context = chat_context(
        config.tasks, specs, config.prompts.files,
        can_ask=config.ask.enabled, retrieve_by_goal=config.bank.key_text_weight is not None,
    )  # fmt: skip
    with _errors_of(config, "its build"):
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
    with _errors_of(config, "its planner"):
        plans = method.planner.plan(task, members, 0)
    guided = sum(plan.condition == "guided" for plan in plans)
    if guided != config.guided_members:
        return (
            f"its SPEC guides {config.guided_members} of {members} members (guided_members), but "
            f"its planner guides {guided}"
        )
    return ""


@contextmanager
def _errors_of(config: RunConfig, part: str) -> Iterator[None]:
    """Raise `ConfigError` for any error of an own method, with the line that raised it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a user's code can raise anything
        if not plugins.is_reference(config.method):
            raise
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            "method",
            config.method,
            f"{part} raised {type(error).__name__} at {line.filename}:{line.lineno}: {error}",
            "Correct the method",
        ) from error


def require_method(config: RunConfig) -> None:
    """Raise `ConfigError` if an own method cannot be built, or cannot run with these learners.

    Bundled methods are not built, because that would import torch.
    """
    if not plugins.is_reference(config.method):
        return
    method = build_method(config, tasks.specs(config))
    roles = [method.actor, *([method.extractor] if method.extractor else [])]
    if LEARNERS[config.learner.kind].in_process:
        return
    for role in roles:
        if problem := _transfer_problem(role.loss):
            raise ConfigError(
                "method",
                config.method,
                f"learner.kind is {config.learner.kind}, but {problem}",
                "Move it to a module on PYTHONPATH, and name it package.module:SPEC",
            )


def _transfer_problem(loss: Loss) -> str:
    """Return why a loss cannot be sent to another process, or "" if it can."""
    try:
        data = pickle.dumps(loss)
    except Exception as error:  # pickle raises several types
        return f"its loss cannot be sent to other processes ({error})"
    if plugins.is_pickled_by_file(data):
        return "other processes cannot import its loss from a file"
    return ""
