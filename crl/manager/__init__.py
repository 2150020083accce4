"""Experience manager: retrieval, distillation and credit on a durable bank.

The package imports neither torch nor transformers.
"""

from crl.manager.calls import CallClock
from crl.manager.credit import ExtractorSample
from crl.manager.distillation.distil import PromptWriter
from crl.manager.distillation.merge import MergePromptWriter
from crl.manager.distillation.ops import OpLimits
from crl.manager.distillation.refine import RefinePromptWriter
from crl.manager.failure_library import BankFailures
from crl.manager.manager import ExperienceManager
from crl.manager.records import (
    Distilled,
    DistilRequest,
    EpisodeId,
    Generation,
    GroupSuccess,
    RolledBack,
    UnitKey,
)
from crl.manager.settings import ManagerSettings, Progress, Prompts, QueueSettings

__all__ = [
    "BankFailures",
    "CallClock",
    "DistilRequest",
    "Distilled",
    "EpisodeId",
    "ExperienceManager",
    "ExtractorSample",
    "Generation",
    "GroupSuccess",
    "ManagerSettings",
    "MergePromptWriter",
    "OpLimits",
    "Progress",
    "PromptWriter",
    "Prompts",
    "QueueSettings",
    "RefinePromptWriter",
    "RolledBack",
    "UnitKey",
]
