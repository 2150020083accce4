"""The ExperienceManager: retrieval, distillation, credit, on a durable bank. Imports neither torch nor transformers."""

from crl.manager.credit import CreditSettings, ExtractorSample
from crl.manager.distil import DistilSettings
from crl.manager.manager import ExperienceManager, ManagerSettings
from crl.manager.ops import OpLimits
from crl.manager.records import DistilRequest
from crl.manager.retrieval import RetrievalSettings

__all__ = [
    "CreditSettings",
    "DistilRequest",
    "DistilSettings",
    "ExperienceManager",
    "ExtractorSample",
    "ManagerSettings",
    "OpLimits",
    "RetrievalSettings",
]
