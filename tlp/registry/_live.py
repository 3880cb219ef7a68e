"""A version's live quality, logged over time to the MLflow run that made it.

The measurement store is the record; MLflow gets what it does not have yet. The newest value of `live/DEVICE/rounds`
says how many rounds are there, so a run that was killed, or had no MLflow, is caught up by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from storage import RoundQuality
from tlp.registry._mlflow import retrying

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PER_CALL: Final = 900  # MLflow takes 1000 values in one log_batch


def log_rounds(client: MlflowClient, run_id: str, device: str, rounds: Sequence[RoundQuality]) -> int:
    """Log those of a version's rounds on a device, oldest first, that the run does not have; returns how many.

    Metrics `live/DEVICE/pair_accuracy`, `…/best_of_K`, `…/canary_off` and `…/rounds`, one step per round, with the
    time of the round.
    """
    latest = retrying(lambda: client.get_run(run_id)).data.metrics
    known = int(latest.get(f"live/{device}/rounds", 0.0))
    pending: list[Any] = []
    for number, row in enumerate(rounds[known:], start=known + 1):
        pending += _metrics(device, number, row)
        if len(pending) > _PER_CALL - 10:
            client.log_batch(run_id, metrics=pending)
            pending = []
    if pending:
        client.log_batch(run_id, metrics=pending)
    return max(len(rounds) - known, 0)


def _metrics(device: str, number: int, row: RoundQuality) -> list[Any]:
    from mlflow.entities import Metric

    values = {f"best_of_{k}": ratio for k, ratio in row.best_of.items()}
    if pairs := sum(row.pairs):
        values["pair_accuracy"] = sum(row.pairs_right) / pairs
    if row.canary_off is not None:
        values["canary_off"] = float(row.canary_off)
    # Last: once it is there, so is the round.
    values["rounds"] = float(number)
    at = int(row.at.timestamp() * 1000)
    return [Metric(f"live/{device}/{key}", float(value), at, number) for key, value in values.items()]
