"""The model registry: the only place that talks to MLflow. Importing it does not import mlflow.

`Registry` implements `tlp.core.registry.ModelRegistry`; `kept` holds trained models that are not registered yet.
"""

from tlp.core.registry import CHAMPION, pin_alias
from tlp.registry.mlflow import ENVIRONMENT as MLFLOW_ENVIRONMENT
from tlp.registry.mlflow import log_night
from tlp.registry.moves import recorded_models
from tlp.registry.registry import Registry, models_at
from tlp.registry.versions import family_of, find_champion, model_name
