"""Stored best configs for user code: `best_config`. No jax import."""

from autotune.lookup.best import BestConfig, best_config
from autotune.lookup.library import StaleResultsWarning, forget

__all__ = ["BestConfig", "StaleResultsWarning", "best_config", "forget"]
