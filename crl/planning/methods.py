"""Method of a run, built from its config."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from crl import plugins
from crl.config.schema import RunConfig
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.planning import tasks
from crl.planning.context import chat_context
from crl.protocols import Loss, Method, TrainSpec
from crl.types import Task


def build_method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    """Return the method of a run.

    Raise `ConfigError` if a user's method cannot be built, or if `build` returns no method or a
    method that contradicts its spec.
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
    if not isinstance(method.actor, TrainSpec):
        return (
            f"the actor of its Method is of type {type(method.actor).__name__}, not a "
            "crl.protocols.TrainSpec"
        )
    if config.with_bank != (method.distiller is not None):
        return (
            f"its SPEC uses {'a' if config.with_bank else 'no'} bank, but the distiller "
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
        plans = list(method.planner.plan(task, members, 0))
        guided = sum(plan.condition == "guided" for plan in plans)
    if len(plans) != members:
        return f"its planner returned {len(plans)} plans for a group of {members} members"
    if guided not in (0, config.guided_members):  # a planner may guide a part of the steps
        return (
            f"its SPEC guides {config.guided_members} of {members} members (guidance), but "
            f"its planner guides {guided}"
        )
    return ""


@contextmanager
def _errors_of(config: RunConfig, part: str) -> Iterator[None]:
    """Raise `ConfigError` for any error of a user's method, with the line of its file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's code can raise anything
        if not plugins.is_reference(config.method):
            raise
        reason = f"{part} raised {type(error).__name__}{_line(error, config.method)}: {error}"
        raise ConfigError("method", config.method, reason, "Correct the method") from error


def _line(error: BaseException, reference: str) -> str:
    """Return the last line of the method's own files in a traceback, or "" if there is none."""
    folder = plugins.source_folder(reference)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder in Path(frame.filename).parents]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def require_method(config: RunConfig) -> None:
    """Raise `ConfigError` if a user's method cannot be built or cannot run with these learners.

    Bundled methods are not built, because that would import torch.
    """
    if not plugins.is_reference(config.method):
        return
    method = build_method(config, tasks.specs(config))
    roles = [method.actor, *([method.extractor] if method.extractor else [])]
    if LEARNERS[config.learner.kind].in_process:
        return
    for role in roles:
        _require_transferable(config, role.loss)


def _require_transferable(config: RunConfig, loss: Loss) -> None:
    """Raise `ConfigError` if a loss cannot be sent to another process."""
    start = f"learner.kind is {config.learner.kind}, but"
    try:
        data = pickle.dumps(loss)
    except Exception as error:  # pickle raises several types
        raise ConfigError(
            "method",
            config.method,
            f"{start} its loss cannot be sent to other processes ({error})",
            "Define the loss as a class at the top level of a module",
        ) from error
    if plugins.is_pickled_by_file(data):
        raise ConfigError(
            "method",
            config.method,
            f"{start} other processes cannot import its loss from a file",
            "Move it to a module on PYTHONPATH, and name it package.module:SPEC",
        )
