from autotune.lookup import best_config as best_config
from autotune.tuning import tune as tune

__version__: str
