"""The model registry: the only place that talks to MLflow.

`Registry` registers, resolves, promotes, rolls back and reconciles. Importing this package does not import MLflow.
"""

from tlp.registry._fallback import UsableVersion
from tlp.registry._mlflow import ENVIRONMENT as MLFLOW_ENVIRONMENT
from tlp.registry._registry import Registry
from tlp.registry._types import (
    CHAMPION,
    REJECTED,
    ModelVersion,
    ResolvedModel,
    VersionFacts,
    family_of,
    model_name,
    pin_alias,
    rejected_tag,
)

__all__ = [
    "CHAMPION",
    "MLFLOW_ENVIRONMENT",
    "REJECTED",
    "ModelVersion",
    "Registry",
    "ResolvedModel",
    "UsableVersion",
    "VersionFacts",
    "family_of",
    "model_name",
    "pin_alias",
    "rejected_tag",
]
