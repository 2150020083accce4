"""Experience manager: retrieval, distillation and credit on a durable bank.

The package imports neither torch nor transformers.
"""

from crl.manager.credit import CreditSettings, ExtractorSample
from crl.manager.distillation.distil import DistilSettings, PromptWriter
from crl.manager.distillation.merge import MergePromptWriter, MergeStats
from crl.manager.distillation.ops import OpLimits
from crl.manager.distillation.refine import RefinePromptWriter
from crl.manager.embed import CachedEmbedder
from crl.manager.manager import ExperienceManager
from crl.manager.records import Distilled, DistilRequest, Generation, GroupSuccess, UnitKey
from crl.manager.retrieval.choice import RetrievalSettings
from crl.manager.settings import ManagerSettings, Progress, Prompts

__all__ = [
    "CachedEmbedder",
    "CreditSettings",
    "DistilRequest",
    "DistilSettings",
    "Distilled",
    "ExperienceManager",
    "ExtractorSample",
    "Generation",
    "GroupSuccess",
    "ManagerSettings",
    "MergePromptWriter",
    "MergeStats",
    "OpLimits",
    "Progress",
    "PromptWriter",
    "Prompts",
    "RefinePromptWriter",
    "RetrievalSettings",
    "UnitKey",
]
