"""The in-memory store's runs, tuning results and model events."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from storage._base import MeasurementStore
from storage._rows import (
    check_outcome,
    checked_model_event,
    checked_tuning_result,
    json_text,
    json_value,
    now_utc,
    outcome_code,
)
from storage._types import ModelEvent, ReasonCode, Run, RunKind, RunState, TuningResult
from storage.errors import InvalidInputError, NotFoundError


def copy_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy the caller may do with as he likes."""
    return json_value(json_text("a stored value", value))


class MemoryRuns(MeasurementStore):
    """The part of `MemoryStore` that keeps what was done."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._tuning_results: list[TuningResult] = []
        self._model_events: list[ModelEvent] = []

    # -- runs -------------------------------------------------------------------------------------------------
    def start_run(
        self, kind: RunKind, *, device: str | None, params: Mapping[str, Any], owner: Mapping[str, Any]
    ) -> str:
        run_id = uuid.uuid4().hex
        run = Run(
            run_id,
            kind,
            device,
            json_value(json_text("params of a run", params)),
            json_value(json_text("owner of a run", owner)),
            now_utc(),
            RunState.RUNNING,
            "",
            None,
        )
        with self._lock:
            self._runs[run_id] = run
        return run_id

    def finish_run(
        self,
        run_id: str,
        state: RunState,
        reason: str,
        result: Mapping[str, Any] | None = None,
        *,
        code: ReasonCode | None = None,
    ) -> None:
        check_outcome(run_id, state)
        values = json_value(json_text("result of a run", result or {}))
        with self._lock:
            run = self.get_run(run_id)
            if run.state.is_finished():
                raise InvalidInputError(f"run {run_id} was finished before, as {run.state}")
            self._runs[run_id] = replace(
                run,
                state=state,
                reason=reason,
                finished_at=now_utc(),
                result=values,
                code=code or outcome_code(state),
            )

    def get_run(self, run_id: str) -> Run:
        with self._lock:
            if run_id not in self._runs:
                raise NotFoundError(f"no run {run_id!r}", next_command="tlp status")
            return _fresh_run(self._runs[run_id])

    def list_runs(
        self,
        *,
        kind: RunKind | None = None,
        state: RunState | None = None,
        device: str | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        with self._lock:
            found = [
                _fresh_run(run)
                for run in reversed(self._runs.values())
                if (kind is None or run.kind == kind)
                and (state is None or run.state == state)
                and (device is None or run.device == device)
            ]
        return found[:limit]

    # -- tuning and models ------------------------------------------------------------------------------------
    def add_tuning_results(self, results: Sequence[TuningResult]) -> None:
        checked = [checked_tuning_result(result) for result in results]
        with self._lock:
            self._tuning_results.extend(checked)

    def tuning_results(
        self, *, network: str | None = None, device: str | None = None, run_id: str | None = None
    ) -> list[TuningResult]:
        with self._lock:
            return [
                r
                for r in self._tuning_results
                if (network is None or r.network == network)
                and (device is None or r.device == device)
                and (run_id is None or r.run_id == run_id)
            ]

    def add_model_event(self, event: ModelEvent) -> None:
        event = checked_model_event(event)
        with self._lock:
            self._model_events.append(event)

    def model_events(self, *, model: str | None = None, alias: str | None = None) -> list[ModelEvent]:
        with self._lock:
            return [
                e
                for e in self._model_events
                if (model is None or e.model == model) and (alias is None or e.alias == alias)
            ]


def _fresh_run(run: Run) -> Run:
    return replace(run, params=copy_json(run.params), owner=copy_json(run.owner), result=copy_json(run.result))
