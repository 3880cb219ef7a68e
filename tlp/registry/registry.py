"""`Registry`: versions, aliases and their history in MLflow. See docs/architecture.md, "The life of a model"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import filelock
import httpx

from storage import Actor, MeasurementStore, ModelEvent, ReasonCode, RoundQuality, open_store
from tlp.core import secrets
from tlp.core.errors import BusyError, InvalidInputError, NotFoundError
from tlp.core.registry import (
    CHAMPION,
    HOLD,
    HOLD_REASON,
    ModelRegistry,
    ModelVersion,
    ResolvedModel,
    Standing,
    Submission,
    holds_of,
    of_device,
    pin_alias,
)
from tlp.core.settings import Settings
from tlp.model.kinds import KINDS
from tlp.registry import mlflow as door
from tlp.registry import moves, versions
from tlp.registry.mlflow import retrying
from tlp.registry.versions import family_of, model_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_VERSION: Final = re.compile(r"v?(\d+)")
_LOCK_TIMEOUT_S: Final = 60.0


class Registry(ModelRegistry):
    """The registered models of this installation, in MLflow, which is opened at the first call.

    Instances may be used from any thread. `store` records the alias moves; None: opened when it is first needed.
    """

    def __init__(self, settings: Settings, store: MeasurementStore | None = None) -> None:
        self._settings = settings
        self._store = store
        self._opened: MlflowClient | None = None

    def ensure(self) -> None:
        """Make the database file and the experiment if they are not there (about 6 s the first time)."""
        with self._mapped("preparing the registry"):
            self._experiment_id()

    # -- versions ---------------------------------------------------------------------------------------------
    def register(self, submission: Submission) -> int:
        """Keep a checkpoint as the next version and return its number; once per submission."""
        if not submission.checkpoint_dir.is_dir():
            what = f"{submission.checkpoint_dir} is not a checkpoint directory"
            raise InvalidInputError(what, next_command="tlp train")
        with self._mapped(f"registering a version of {model_name(submission.family)}"):
            return versions.register_version(self._client, self._experiment_id(), submission)

    def find_submission(self, family: str, submission: str) -> int | None:
        """The version that a submission became; None if it became none."""
        model = model_name(family)
        with self._mapped(f"looking for submission {submission} of {model}"):
            return versions.find_version(self._client, self._experiment_id(), model, submission)

    def list_versions(self, family: str | None = None) -> list[ModelVersion]:
        """All versions, newest first within each model."""
        with self._mapped("listing model versions"):
            models = self._read.models() if family is None else [model_name(family)]
            return [version for model in models for version in self._read.versions(model)]

    def show(self, family: str, version: int) -> ModelVersion:
        """One version with its metrics. Raises NotFoundError, which names the versions there are."""
        model = model_name(family)
        with self._mapped(f"reading version {version} of {model}"):
            row = self._read.get(model, version)
            if row.run_id is None:
                return row
            return replace(row, metrics=dict(retrying(lambda: self._client.get_run(str(row.run_id))).data.metrics))

    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""
        model = model_name(family)
        with self._mapped(f"tagging version {version} of {model}"):
            self._mover().tag(model, version, key, door.tag_text(value))

    def resolve(self, family: str, device: str | None = None, ref: str | int = CHAMPION) -> ResolvedModel:
        """The version to work with now, and its files."""
        model = model_name(family)
        number = _VERSION.fullmatch(str(ref))
        with self._mapped(f"resolving {ref} of {model}"):
            alias, version = (None, int(number[1])) if number else self._read.aim(model, str(ref), device)
            row = self._read.get(model, version)
            folder = versions.checkpoint_dir(self._client, self._settings, model, version)
            return ResolvedModel(model, version, alias, folder, row.tags)

    def champion_version(self, family: str) -> int | None:
        """Where `champion` points now; None: nowhere."""
        model = model_name(family)
        with self._mapped(f"looking for the champion of {model}"):
            return self._read.aliases(model).get(CHAMPION)

    def last_good(self, family: str, device: str | None) -> list[int]:
        """Versions to fall back to, best first."""
        model = model_name(family)
        with self._mapped(f"looking for the last good version of {model}"):
            with suppress(BusyError), self._moving(family):
                self._mover().reconcile(model)  # an alias that a person took away is a verdict
            return moves.last_good(self._events.model_events(model=model), self._read.versions(model), device)

    def models(self) -> list[dict[str, Any]]:
        """The models as MLflow has them, in the shape of `moves.model_row`; [] if nothing was ever registered."""
        path = door.database_path(self._settings.mlflow_tracking_uri)
        if path is not None and not path.exists():
            return []
        with self._mapped("listing models"):
            rows = [(name, self._read.registered(name), self._read.versions(name)) for name in self._read.models()]
            return [
                moves.model_row(name, versions.numbers(row), len(known), holds_of(row.tags))
                for name, row, known in rows
                if row is not None
            ]

    def standing(self, family: str, version: int) -> Standing:
        """Aliases and holds of the model, and the tags of a version."""
        model = model_name(family)
        with self._mapped(f"looking at version {version} of {model}"):
            row, registered = self._read.get(model, version), self._read.registered(model)
            aliases = versions.numbers(registered)
            prefix = pin_alias("")
            pins = {alias.removeprefix(prefix): at for alias, at in aliases.items() if alias.startswith(prefix)}
            return Standing(aliases.get(CHAMPION), pins, holds_of(registered.tags), row.tags)

    # -- aliases ----------------------------------------------------------------------------------------------
    def promote(
        self, family: str, version: int, *, reason: str, by: Actor = Actor.PIPELINE, alias: str = CHAMPION
    ) -> ModelEvent | None:
        """Move an alias to a version and record the move; None if it is there already."""
        model = model_name(family)
        moves.check_alias(alias)
        with self._mapped(f"promoting version {version} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            return mover.move(model, alias, version, reason=reason, by=by)

    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move `champion` to a version that passed the gate; False if that was done before."""
        model = model_name(family)
        with self._mapped(f"promoting version {version} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            moved_to = {event.to_version for event in self._events.model_events(model=model, alias=CHAMPION)}
            if str(version) in moved_to:
                return False
            now = self._read.aliases(model).get(CHAMPION)
            moves.check_judged(model, version, now, judged_against, parent, lambda v: mover.is_rejected(model, v))
            return mover.move(model, CHAMPION, version, reason=reason, by=Actor.PIPELINE) is not None

    def unpin(self, family: str, device: str, version: int, *, reason: str) -> ModelEvent | None:
        """Take a device's pin off a version; None if it is not there."""
        model = model_name(family)
        with self._mapped(f"ending the pin of {device}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            return mover.unpin(model, pin_alias(device), version, reason=reason)

    def hold(self, family: str, reason: str, *, device: str | None = None) -> None:
        """Nothing is promoted, for the device or at all, until it is released; tags of the model say so."""
        model, tag = model_name(family), of_device(HOLD, device)
        with self._mapped(f"holding {model}"), self._moving(family):
            if self._read.registered(model) is None:
                raise NotFoundError(f"{model} is not registered yet", next_command="tlp model list")
            self._client.set_registered_model_tag(model, of_device(HOLD_REASON, device), door.tag_text(reason))
            self._client.set_registered_model_tag(model, tag, "true")
            self._mover().reconcile(model)

    def release(self, family: str, reason: str, *, device: str | None = None) -> bool:
        """The end of a hold; False if there was none."""
        model, tag = model_name(family), of_device(HOLD, device)
        with self._mapped(f"releasing {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            registered = self._read.registered(model)
            if registered is None or (device or "") not in holds_of(registered.tags):
                return False
            self._client.delete_registered_model_tag(model, tag)
            if of_device(HOLD_REASON, device) in registered.tags:
                self._client.delete_registered_model_tag(model, of_device(HOLD_REASON, device))
            mover.hold(model, tag, ReasonCode.RELEASED, reason)
            return True

    def rollback(
        self,
        family: str,
        to: int | None = None,
        *,
        device: str | None = None,
        reason: str = "rolled back",
        by: Actor = Actor.PERSON,
        code: ReasonCode = ReasonCode.OTHER,
        leaving: int | None = None,
    ) -> ModelEvent:
        """Move an alias back and tag the version it was on as rejected."""
        model = model_name(family)
        alias = CHAMPION if device is None else pin_alias(device)
        with self._mapped(f"rolling back {alias} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            aliases = self._read.aliases(model)
            current = aliases.get(alias, aliases.get(CHAMPION))
            target = mover.previous(model, alias, current) if to is None else to
            moves.check_leaving(model, alias, current, target, leaving)
            return mover.move_back(model, alias, target, from_version=current, reason=reason, by=by, code=code)

    def history(self, family: str | None = None) -> list[ModelEvent]:
        """Recorded alias moves, oldest first; of every family if None. Does not ask MLflow."""
        return self._events.model_events(model=None if family is None else model_name(family))

    def reconcile(self) -> list[ModelEvent]:
        """Record every alias move that has no record and return the new records.

        A move that we announced and could not record is recorded as ours, any other as a person's, which is a verdict:
        the version moved back from is rejected, one moved on to is no longer.
        """
        events = []
        with self._mapped("reconciling aliases"):
            for model in self._read.models():
                with self._moving(family_of(model)):
                    events += self._mover().reconcile(model)
        return events

    # -- runs -------------------------------------------------------------------------------------------------
    def close_stale_runs(self) -> list[str]:
        """Close as KILLED the MLflow runs whose process on this host is gone and return their ids."""
        with self._mapped("closing stale runs"):
            return door.close_stale(self._client, self._experiment_id())

    def log_live(self, family: str, device: str, *, versions: Sequence[str] | None = None) -> int:
        """Log the live quality of versions to the runs that made them; how many rounds were new to MLflow.

        Metrics `live/DEVICE/pair_accuracy`, `…/best_of_K`, `…/canary_off` and `…/rounds`, one step per round, with its
        time. The newest value of `rounds` says how many MLflow has: what a killed run left out, the next one logs.
        """
        rounds: dict[str, list[RoundQuality]] = {}
        for row in self._events.round_qualities(device=device):
            rounds.setdefault(row.version, []).append(row)
        model, logged = model_name(family), 0
        with self._mapped(f"logging the live quality of {model} on {device}"):
            made_by = {str(version.version): version.run_id for version in self._read.versions(model)}
            for version, rows in rounds.items():
                run_id = made_by.get(version)
                if run_id is None or (versions is not None and version not in versions):
                    continue
                latest = retrying(lambda run_id=run_id: self._client.get_run(run_id)).data.metrics  # type: ignore[misc]
                known = int(latest.get(f"live/{device}/rounds", 0.0))
                new = [_live(device, number, row) for number, row in enumerate(rows[known:], start=known + 1)]
                door.log_metrics(self._client, run_id, [metric for metrics in new for metric in metrics])
                logged += len(new)
        return logged

    # -- inside -----------------------------------------------------------------------------------------------
    @property
    def _client(self) -> MlflowClient:
        if self._opened is None:
            self._opened = door.open_client(self._settings)
        return self._opened

    @property
    def _events(self) -> MeasurementStore:
        if self._store is None:
            self._store = open_store(self._settings.store_url)
        return self._store

    @property
    def _read(self) -> versions.Reader:
        return versions.Reader(self._client)

    def _mover(self) -> moves.Mover:
        return moves.Mover(self._client, self._events)

    def _experiment_id(self) -> str:
        return door.ensure_experiment(self._client, self._settings, door.EXPERIMENT)

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        _ = self._client  # opened outside: what goes wrong there is named there
        with door.map_mlflow_errors(doing, uri=self._settings.mlflow_tracking_uri):
            yield

    @contextmanager
    def _moving(self, family: str) -> Iterator[None]:
        """One mover of a model's aliases at a time on this host; flock, so it dies with its holder."""
        path = self._settings.locks_dir / f"registry-{family}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S).acquire()
        except filelock.Timeout as exc:
            raise BusyError(
                f"another process has been moving aliases of {model_name(family)} for {_LOCK_TIMEOUT_S:.0f} s ({path})",
                next_command="tlp status",
            ) from exc
        with lock:
            yield


def models_at(store: MeasurementStore, server: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """The models in the shape of `moves.model_row`, and a warning or None; does not import mlflow.

    Without a `server` (MLflow's address), the recorded history says where the aliases are.
    """
    if server is None:
        return moves.recorded_models(store), None
    try:
        answer = door.ask_server(server, [kind.prefix for kind in KINDS.values()])
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        why = f"the registry at {secrets.mask(server)} cannot be read ({type(exc).__name__}): tlp doctor"
        return [row | {"versions": None} for row in moves.recorded_models(store)], why
    return [moves.model_row(name, *said) for name, said in sorted(answer.items())], None


def _live(device: str, number: int, row: RoundQuality) -> list[Metric]:
    """Metrics of a device's round, the `number`th of the version."""
    values = {f"best_of_{k}": ratio for k, ratio in row.best_of.items()}
    if pairs := sum(row.pairs):
        values["pair_accuracy"] = sum(row.pairs_right) / pairs
    if row.canary_off is not None:
        values["canary_off"] = float(row.canary_off)
    values["rounds"] = float(number)  # last: once it is there, so is the round
    at = int(row.at.timestamp() * 1000)
    return [door.metric(f"live/{device}/{key}", value, at, number) for key, value in values.items()]
