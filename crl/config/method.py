"""Methods as the configuration sees them: their own settings, and the parts of a run they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

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


def no_parts(settings: Any) -> frozenset[Part]:
    """Return no part: the method uses all its parts."""
    return frozenset()


def no_text(settings: Any) -> str:
    """Return the empty text."""
    return ""


def no_prompts(settings: Any) -> frozenset[str]:
    """Return no prompt: the method has no further prompts."""
    return frozenset()


def no_guided_members(settings: Any, members: int) -> int:
    """Return 0: the method guides no member of a group."""
    return 0


def always_effective(settings: Any, name: str) -> None:
    """Return None: every setting of the method has an effect."""


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
    settings: type[Section] | None = None
    """Type of the method's section; None if the method has no settings."""
    uses: frozenset[Part] = frozenset({"probe"})
    """Parts of a run that the method uses."""
    unused_parts: Callable[[Any], frozenset[Part]] = no_parts
    """Function `(settings)` that returns the parts of `uses` that these settings switch off."""
    trains_actor: bool = True
    """False if the actor is never trained, whatever `actor.train` says."""
    note: str = ""
    """Prompt with which the bank's writer, a language model, writes one note about an episode.

    The answer is the text of a new experience. Empty: the prompt `distil`, whose answer is a list
    of operations. Tiny models have one prompt for both.
    """
    state_keys: bool = False
    """True if experiences are found by the last state of the episode that they are about."""
    guidance: Callable[[Any], str] = no_text
    """Function `(settings)` that says for the plan of a run what guides episodes, and when.

    Empty: the number of guided members, and one experience for each search.
    """
    guides: bool = True
    """False if no agent is ever shown an entry of the bank."""
    prompts: Callable[[Any], frozenset[str]] = no_prompts
    """Function `(settings)` that returns the names of further prompts that language models read."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of other sections, nested, that the method has instead of those of the preset.

    The user's own preset, tasks and options override them.
    """
    guided_members: Callable[[Any, int], int] = no_guided_members
    """Function `(settings, members)` that returns how many of a group's members may be guided."""
    check: Callable[[RunConfig, Any], None] = no_check
    """Function `(config, settings)` that raises `ConfigError` for a contradiction."""
    unused_reason: Callable[[Any, str], tuple[str, str] | None] = always_effective
    """Function `(settings, name)` that returns why a setting has no effect, and the remedy.

    It returns None if the setting has an effect. It is called for settings of the command line.
    """

    def parts(self, settings: Any) -> frozenset[Part]:
        """Return the parts that a run with these settings of the method uses.

        `settings` may also be the unchecked section as a mapping. All parts are returned if it is
        invalid.
        """
        if self.settings and isinstance(settings, Mapping):
            try:
                settings = self.settings.model_validate(settings)
            except ValidationError:
                return self.uses
        return self.uses - self.unused_parts(settings)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a spec that no run can have."""
        reason = ""
        if not _NAME.fullmatch(self.name):
            reason = "its name must have lower-case letters, digits and underscores only"
        elif unknown := self.uses - set(get_args(Part)):
            reason = f"it uses {', '.join(sorted(unknown))}, which no run has"
        elif "extractor" in self.uses and "bank" not in self.uses:
            reason = "an extractor needs a bank for its experiences"
        elif self.settings and any(f.is_required() for f in self.settings.model_fields.values()):
            reason = f"a setting of {self.settings.__name__} has no default"
        if reason:
            raise ConfigError("method", self.name, reason, "Correct the MethodSpec")


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
    for switch in ("ask", "critic"):
        if getattr(config, switch).enabled:
            reason = f"cannot be used: {config.method} has no such exchange about notes"
            raise ConfigError(f"{switch}.enabled", True, reason, "Leave it out")
    if config.bank.evict_votes is not None:
        reason = "cannot be used: a note is a text, without votes"
        raise ConfigError("bank.evict_votes", config.bank.evict_votes, reason, "Leave it unset")


def method_spec(name: str) -> MethodSpec:
    """Return the spec of a bundled method, or of the reference to a user's spec.

    Raise `ConfigError` if there is no such method.
    """
    reference = BUNDLED_METHODS.get(name, name)
    if not plugins.is_reference(reference):
        own = "Own methods: path/to/file.py:SPEC or package.module:SPEC"
        remedy = f"{did_you_mean(name, BUNDLED_METHODS)}. {own}"
        raise ConfigError("method", name, "is not a method", remedy)
    return plugins.load(
        reference,
        MethodSpec,
        "method",
        example="crl/methods/grpo.py",
        base="A relative path starts at the working directory",
    )
