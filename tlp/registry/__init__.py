"""The model registry: the only place that talks to MLflow.

`Registry` registers, resolves, promotes, rolls back and reconciles; `tlp.registry.rest` reads the champions through
MLflow's REST API for callers that must not import MLflow. Importing this package does not import it either.
"""

from tlp.registry._registry import Registry
from tlp.registry._types import (
    CHAMPION,
    REJECTED,
    ModelVersion,
    ResolvedModel,
    VersionFacts,
    model_name,
    pin_alias,
    rejected_tag,
)

__all__ = [
    "CHAMPION",
    "REJECTED",
    "ModelVersion",
    "Registry",
    "ResolvedModel",
    "VersionFacts",
    "model_name",
    "pin_alias",
    "rejected_tag",
]
