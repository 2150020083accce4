"""Methods as the configuration sees them: their own settings, and the parts of a run they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import ValidationError

from crl import plugins
from crl.config.catalog import did_you_mean
from crl.config.section import Section
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

BUNDLED_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "complementary": "crl.methods.complementary:SPEC",
        "grpo": "crl.methods.grpo:SPEC",
        "gigpo": "crl.methods.gigpo:SPEC",
        "empo2": "crl.methods.empo2:SPEC",
        "reflexion": "crl.methods.reflexion:SPEC",
        "role_agent": "crl.methods.role_agent:SPEC",
    }
)
"""Reference of each bundled method, by name."""

ACTOR_ALONE = "grpo"
"""Bundled method that trains only the actor, without experience."""

Part = Literal["bank", "extractor", "probe"]
"""Part of a run that not every method uses.

bank = the experience bank, whose experiences guide episodes; extractor = the model that distils
episodes into the bank; probe = the advice probe, which measures the actor. Without an extractor,
the actor itself writes the experiences of the bank.
"""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def no_check(config: RunConfig, settings: Any) -> None:
    """Accept every configuration."""


def no_text(settings: Any) -> str:
    """Return the empty text."""
    return ""


class MethodSection(Section):
    """Base class of the section of a method. Its functions tell what the settings do in a run."""

    SHOWN: ClassVar[tuple[str, ...]] = ()
    """Names of settings on which the prompts of agents in evaluations depend."""
    SWITCHES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Settings without effect if another one of this section is 0: name, and key of the other."""
    TRAINING: ClassVar[tuple[str, ...]] = ()
    """Names of settings without effect if the actor is not trained."""

    def unused_reason(self, config: RunConfig, name: str) -> tuple[str, str] | None:
        """Return why a setting has no effect, and the remedy; None if it has an effect.

        It is called for settings of the command line.
        """
        if name in self.TRAINING and not config.actor.train:
            return "actor.train is false", "Leave it out"
        switch = self.SWITCHES.get(name)
        if switch is None or getattr(self, switch.rpartition(".")[2]):
            return None
        return f"{switch} is 0", f"Set {switch} above 0, or leave it out"

    def plan(self, config: RunConfig) -> Sequence[str]:
        """Return lines for the plan of a run, about what other sections do not tell."""
        return ()

    def prompts(self) -> frozenset[str]:
        """Return the names of the method's own prompts that language models read."""
        return frozenset()

    def measured(self, config: RunConfig) -> Mapping[str, Any]:
        """Return values that evaluations depend on besides the common settings, by dotted key.

        These are values of settings that change the prompts of agents, and hashes of prompts. The
        keys are the same for all settings: a key that a checkpoint lacks is not compared.
        """
        return {f"{config.spec.name}.{name}": getattr(self, name) for name in self.SHOWN}


@dataclass(frozen=True)
class Notes:
    """Plain texts about episodes, which a language model writes into the bank.

    Without notes, the answer to the prompt `distil` is a list of operations. Tiny models have one
    prompt for both.
    """

    prompt: str
    """Name of the prompt with which the bank's writer writes one note about an episode."""
    key: Callable[[Any], str] | None = None
    """Function `(settings)` that returns a name of `crl.manager.keys.STATE_KEYS`, or None.

    Notes are found by this state of the episode that they are about. None: by their own text.
    """


@dataclass(frozen=True)
class Guidance:
    """Guidance of episodes by the bank."""

    members: Callable[[Any, int], int]
    """Function `(settings, members)` that returns how many of a group's members may be guided."""
    text: Callable[[Any], str] = no_text
    """Function `(settings)` that returns what guides episodes, and when, for the plan of a run.

    If the text is empty, the plan has the number of guided members and of experiences per search.
    """
    attempts: bool = False
    """True if the members of a group are attempts, which end with the first success."""


@dataclass(frozen=True)
class MethodSpec:
    """Description of a method. A module of `crl/methods`, or of a user, defines one as `SPEC`.

    The configuration reads specs without torch. A module therefore imports the parts of its method
    in `build`.
    """

    name: str
    """Name of the method, and of its section of the configuration."""
    build: Callable[..., Any]
    """Function `(config, settings, context)` that returns a `crl.protocols.Method`.

    `settings` is the method's section or None. `context` is a `ChatContext` for the run's tasks.
    """
    settings: type[MethodSection] | None = None
    """Type of the method's section; None if the method has no settings."""
    uses: frozenset[Part] | Callable[[Any], frozenset[Part]] = frozenset({"probe"})
    """Parts of a run that the method uses, or a function `(settings)` that returns them."""
    notes: Notes | None = None
    """Notes that the bank's writer writes instead of operations; None for operations."""
    guidance: Guidance | None = None
    """Guidance of episodes by the bank; None if no agent is ever shown an entry of it."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Nested settings of other sections that replace those of a bundled preset.

    The user's own preset, tasks and options override them.
    """
    check: Callable[[RunConfig, Any], None] = no_check
    """Function `(config, settings)` that raises `ConfigError` for a contradiction."""

    def parts(self, settings: Any) -> frozenset[Part]:
        """Return the parts that a run with these settings of the method uses.

        `settings` may also be the unchecked section as a mapping. The parts of the default settings
        are returned if it is invalid.
        """
        if not callable(self.uses):
            return self.uses
        if self.settings and isinstance(settings, Mapping):
            try:
                settings = self.settings.model_validate(settings)
            except ValidationError:
                settings = self.settings()
        return self.uses(settings)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a spec that no run can have."""
        reason = ""
        if not _NAME.fullmatch(self.name):
            reason = "its name must begin with a letter a–z and contain only a–z, digits and _"
        elif self.settings and not issubclass(self.settings, MethodSection):
            reason = f"{self.settings.__name__} is not a crl.config.method.MethodSection"
        elif self.settings and any(f.is_required() for f in self.settings.model_fields.values()):
            reason = f"a setting of {self.settings.__name__} has no default"
        elif unknown := (parts := self.parts({})) - set(get_args(Part)):
            reason = f"it uses {', '.join(sorted(unknown))}, which no run has"
        elif "extractor" in parts and "bank" not in parts:
            reason = "an extractor needs a bank for its experiences"
        if reason:
            raise ConfigError("method", self.name, reason, "Correct the MethodSpec")


def parts_with_writer(settings: Any) -> frozenset[Part]:
    """Return the parts of a method with a bank that `settings.writer` writes."""
    with_extractor = settings.writer == "extractor"
    return frozenset({"bank", "probe", *(["extractor"] if with_extractor else [])})


NOTE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "retrieval": {"per": "rollout", "choice": "credit", "trial_share": 0.0, "margin": 2.0},
        "extractor": {"merge_every": 0},
        "ask": {"enabled": False},
        "critic": {"enabled": False},
    }
)
"""Defaults of methods whose episodes are guided by several notes."""


def check_notes(config: RunConfig, settings: Any) -> None:
    """Raise `ConfigError` for settings that contradict guidance by several notes."""
    if config.retrieval.per == "group":
        reason = "cannot be used: each member searches for several notes of its own"
        raise ConfigError("retrieval.per", "group", reason, "Use --set retrieval.per=rollout")
    check_texts(config)


def check_texts(config: RunConfig) -> None:
    """Raise `ConfigError` for work on experiences that is not possible with notes."""
    for switch in ("ask", "critic"):
        if getattr(config, switch).enabled:
            reason = f"cannot be used: {config.method} does not support it with notes"
            key = f"{switch}.enabled"
            raise ConfigError(key, True, reason, f"Use --set {key}=false")
    if config.bank.evict_votes is not None:
        reason = "cannot be used: a note is a text, without votes"
        raise ConfigError("bank.evict_votes", config.bank.evict_votes, reason, "Leave it unset")
    if config.extractor.merge_every:
        reason = "cannot be used: a note belongs to one episode, so notes are not merged"
        key = "extractor.merge_every"
        raise ConfigError(key, config.extractor.merge_every, reason, "Leave it out")


def method_spec(name: str) -> MethodSpec:
    """Return the spec of a bundled method, or of the reference to a user's spec.

    Raise `ConfigError` if there is no such method.
    """
    reference = BUNDLED_METHODS.get(name, name)
    if not plugins.is_reference(reference):
        own = "Your own method: path/to/file.py:SPEC or package.module:SPEC"
        remedy = f"{did_you_mean(name, BUNDLED_METHODS)}. {own}"
        raise ConfigError("method", name, "is not a method", remedy)
    return plugins.load(
        reference,
        MethodSpec,
        "method",
        example="crl/methods/grpo.py",
        base="A relative path starts at the working directory",
    )
