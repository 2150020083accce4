"""The run's configuration: its schema, how it is put together from layers, how a model is found. No torch."""

from crl.config.load import dump, load, load_saved
from crl.config.models import resolve_model
from crl.config.schema import RunConfig, TaskConfig

__all__ = ["RunConfig", "TaskConfig", "dump", "load", "load_saved", "resolve_model"]
