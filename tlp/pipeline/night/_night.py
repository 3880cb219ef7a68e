"""One night: the due pairs one after the other, each a tuning run of its own, and the report over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from storage import MeasurementStore, ModelEvent, Run, RunKind
from tlp.core.errors import RegistryUnavailableError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.registry import CHAMPION, ResolvedModel, UsableVersion, pin_alias
from tlp.core.requests import NightRequest, TuneRequest
from tlp.core.settings import Settings
from tlp.pipeline import curve as curves
from tlp.pipeline import tune as tuning
from tlp.pipeline.night import _report
from tlp.pipeline.night._common import AnyNight
from tlp.pipeline.night._due import Decided, Pair, decide, plan
from tlp.pipeline.night._report import Turn
from tlp.registry import Registry, model_name
from tlp.report import night as pages
from tlp.search.tuning import find_resumable

T = TypeVar("T")


class NightRegistry(Registry):
    """While MLflow does not answer, the last recorded champion stands in if there is a copy of it here.

    `outages` says what did not work for that reason, one sentence each, each once.
    """

    def __init__(self, settings: Settings, store: MeasurementStore) -> None:
        super().__init__(settings, store)
        self._copies = settings.cache_dir / "models"
        self.outages: list[str] = []

    def reconcile(self) -> list[ModelEvent]:
        """See `Registry.reconcile`; nothing if MLflow does not answer: the next start records the moves."""
        try:
            return super().reconcile()
        except RegistryUnavailableError as exc:
            self._note(f"{exc.message}: moves of aliases will be recorded by the next start")
            return []

    def usable(self, family: str, device: str | None, load: Callable[[ResolvedModel], T]) -> UsableVersion[T]:
        """See `Registry.usable`; RegistryUnavailableError if no copy of the last recorded champion is here either."""
        try:
            return super().usable(family, device, load)
        except RegistryUnavailableError as exc:
            copy = self._copy_of_champion(family, device)
            if copy is None:
                raise
            why = f"MLflow does not answer: version {copy.version} of {copy.model}, the last recorded, from the cache"
            self._note(f"{exc.message}: version {copy.version}, the last recorded champion, is used from the cache")
            return UsableVersion(copy.version, load(copy), why)

    def _copy_of_champion(self, family: str, device: str | None) -> ResolvedModel | None:
        """The version that the recorded moves name, if exactly one copy of it is in the cache."""
        model = model_name(family)
        for alias in [CHAMPION] if device is None else [pin_alias(device), CHAMPION]:
            moves = self._events.model_events(model=model, alias=alias)
            if not moves or moves[-1].to_version is None:
                continue
            version = int(moves[-1].to_version)
            copies = list(self._copies.glob(f"{model}-{version}-*/artifacts/checkpoint"))
            return ResolvedModel(model, version, alias, copies[0], {}) if len(copies) == 1 else None
        return None

    def _note(self, text: str) -> None:
        if text not in self.outages:
            self.outages.append(text)


class Night(AnyNight):
    """A night's decisions, budget and report; the settings `tune_night_trials` and `tune_night_s` bound it.

    Args:
        due_at: when the night was due, UTC; None: now. One that starts late ends when its window ends. One that starts
            after its window (the worker was off) has a window of its own, or it would be lost.
    """

    KIND, WHAT, WORKED, COUNTED = RunKind.TUNE, "tuning night", "tuned", "trials"

    def __init__(self, fleet: Fleet, request: NightRequest, due_at: datetime | None = None) -> None:
        self._registry = NightRegistry(fleet.settings, fleet.store)
        budget = request.trials or fleet.settings.tune_night_trials
        super().__init__(replace(fleet, registry=self._registry), budget, request.device)
        self._request = request
        window_s = fleet.settings.tune_night_s
        late_s = 0.0 if due_at is None else max((self.at - due_at).total_seconds(), 0.0)
        self._end = self._clock + window_s - (late_s if late_s < window_s else 0.0)
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._decided = Decided((), {})

    def decide(self) -> dict[str, Any]:
        """Which pairs are due, with the programs each would get; see `report` for the keys.

        A dry run leaves quarantined devices alone instead of probing those whose probe is due. If nothing is due, any
        other one records a skipped run.

        Raises:
            NotFoundError: no such device.
            RegistryUnavailableError: MLflow does not answer and no champion is known without it.
        """
        dry_run = self._request.dry_run
        self._registry.reconcile()  # a champion that a person moved meanwhile is recorded before it is used
        if not dry_run:
            tuning.carry_on_or_say(self._fleet)
        self._decided = decide(self._fleet, device=self._request.device, probe=not dry_run)
        report = self.report(("would tune: " if self._decided.due else "nothing to do: ") + self._why())
        if not dry_run and not self._decided.due:
            self._record_skip(report["reason"])
        return report

    def _why(self) -> str:
        shown = self._decided.due or self._decided.pairs
        reasons = [pair.reason for pair in shown] or pages.left_out(self._decided.left_out)
        return "; ".join(reasons) or "there are no devices and no networks"

    @property
    def due(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._decided.due)

    def turns(self) -> Iterator[Turn]:
        """The due pairs in their order, each decided anew: other runs, people and devices do not wait for the night."""
        queue = list(self._decided.due)
        for index, planned in enumerate(queue):
            try:
                decided = decide(self._fleet, device=planned.device, network=planned.network)
            except TlpError as exc:  # MLflow went away meanwhile, say: the next pair may be of another family
                self._wait(planned, exc.message)
                continue
            pair = next(iter(decided.pairs), None)
            if pair is None or not pair.due:
                self._wait(planned, pair.reason if pair else "; ".join(decided.left_out.values()))
                continue
            if time.monotonic() > self._end:
                self._wait(planned, f"the night's {self._settings.tune_night_s / 3600:g} h are over")
                continue
            left = max(self.budget - self._spent(), 0)
            share = plan([pair, *queue[index + 1 :]], left, first=not self.rows)[0]
            if share == 0 and pair.need > 0:
                what = f"{left} of {self.budget} programs of the night are left, one round of its tasks is {pair.least}"
                self._wait(planned, what)
                continue
            yield self._turn(pair, share)

    def _turn(self, pair: Pair, share: int) -> Turn:
        seen: frozenset[str] = frozenset()
        if pair.resume:
            parts = find_resumable(self._store, pair.network, pair.device).run_ids
            seen = frozenset(p for part in parts for p in self._store.measurements(run_id=part)["program_id"])
        best = curves.best(self._store, self._store.get_network(pair.network), pair.device)
        say(f"{pair.reason}: {share} programs")
        return Turn(pair, share, best, seen, datetime.now(UTC), time.monotonic())

    def tune(self, turn: Turn) -> dict[str, Any]:
        """Tune a pair until it is flat or has its programs; returns its row. Hand what it raises to `failed`."""
        pair = turn.pair
        trials: int | None = turn.trials
        if pair.resume:  # the interrupted run's own total, unless the night has not that much left
            trials = None if turn.trials >= pair.need else pair.spent + turn.trials
        request = TuneRequest(
            network=pair.network, device=pair.device, trials=trials, resume=pair.resume, until_flat=True
        )
        report = tuning.tune(self._fleet, request)
        return self._add(turn, "tuned", report["reason"], report)

    def failed(self, turn: Turn, exc: Exception) -> None:
        """Take up a pair whose tuning raised; what it measured before counts."""
        ended, text = self._take_error(f"{turn.pair.network} on {turn.pair.device}", exc)
        self._add(turn, ended, text, {})

    def close(self) -> dict[str, Any]:
        """The report, also in the night's run row and in MLflow."""
        try:
            self._registry.reconcile()  # what a person moved during the night is in the history by the morning
        except TlpError as exc:
            self._registry.outages.append(exc.message)
        report = self.report(self._outcome(len(self._decided.due)))
        try:
            report["mlflow_run"] = _report.log(self._settings, self.at, report, self._curves)
        except TlpError as exc:
            report["warnings"].append(f"the night is in the store, not in MLflow: {exc.message}")
        if self._run is not None:
            self._run.reason = report["reason"]
            kept = ("tuned", "waiting", "warnings", "mlflow_run", "spent_before")
            self._run.result = {"trials": self._spent(), **{key: report[key] for key in kept}}
        return report

    def report(self, reason: str) -> dict[str, Any]:
        """JSON values.

        `budget` and `spent_before` (programs), `pairs` (`Pair.to_json` and `share`), `left_out` (name → reason),
        `tuned` (rows), `waiting` (network, device, reason), `warnings`, `mlflow_run`, `reason`, `seconds`.
        """
        shares = plan(self._decided.due, self.budget - self.spent_before)
        pairs = [pair.to_json() for pair in self._decided.pairs]
        for index, row in enumerate(pairs):
            row["share"] = shares[index] if index < len(shares) else 0  # due ones come first
        return {
            "at": self.at.isoformat(),
            "budget": self.budget,
            "spent_before": self.spent_before,
            "pairs": pairs,
            "left_out": dict(self._decided.left_out),
            "tuned": self.rows,
            "waiting": self.waiting,
            "warnings": list(self._registry.outages),
            "mlflow_run": None,
            "reason": reason,
            "seconds": time.monotonic() - self._clock,
        }

    # -- inside -----------------------------------------------------------------------------------------------
    def _wait(self, pair: Pair, reason: str) -> None:
        self.waiting.append({"network": pair.network, "device": pair.device, "reason": reason})

    def _add(self, turn: Turn, ended: str, reason: str, report: Mapping[str, Any]) -> dict[str, Any]:
        """Take up a pair's row; the night's run has it from now on, however the night ends."""
        brought, points = _report.row_of_run(self._store, turn, self._run_of(turn))
        if len(points) > 1:
            self._curves[f"{turn.pair.network}/{turn.pair.device}"] = points
        row = brought | {
            "ended": ended,
            "reason": reason,
            "versions": report.get("model_versions") or brought["versions"],
            "degraded": report.get("degraded", {}).get("events", 0),
            "warnings": report.get("warnings", []),
            "seconds": time.monotonic() - turn.clock,
        }
        self.rows.append(row)
        if self._run is not None:
            self._run.result = {"tuned": self.rows, "trials": self._spent()}
        return row

    def _run_of(self, turn: Turn) -> Run | None:
        """The tuning run of a turn; None if it did not get so far."""
        for run in self._store.list_runs(kind=RunKind.TUNE, device=turn.pair.device, limit=1):
            if run.params.get("network") == turn.pair.network and run.started_at >= turn.at:
                return run
        return None

    def _parts(self, recent: list[Run], night: Run, until: datetime) -> list[Run]:
        return [
            run
            for run in recent
            if run.device is not None and run.owner == night.owner and night.started_at <= run.started_at < until
        ]
