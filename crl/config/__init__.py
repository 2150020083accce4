"""Configuration of a run: its schema, its assembly from layers, and the lookup of models.

Imports no torch.
"""

from crl.config.load import dump, load, load_saved
from crl.config.models import resolve_model
from crl.config.schema import RunConfig, TaskConfig

__all__ = ["RunConfig", "TaskConfig", "dump", "load", "load_saved", "resolve_model"]
