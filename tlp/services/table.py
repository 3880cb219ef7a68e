"""The services of `tlp up`. A new one is a file with its `ServiceKind`, and a name in this table."""

from __future__ import annotations

from typing import Final

from tlp.services.contract import ServiceKind
from tlp.services.mlflow import MLFLOW
from tlp.services.prefect import PREFECT, WORKER

SERVICES: Final[tuple[ServiceKind, ...]] = (MLFLOW, PREFECT, WORKER)
"""In the order in which people see them; they stop in the reverse order."""
