"""`Registry`: versions, aliases and their history. See docs/architecture.md, "The life of a model"."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import filelock

from storage import Actor, ModelEvent, RoundQuality
from tlp.core import processes as _process
from tlp.core.errors import BusyError, InvalidInputError
from tlp.registry import _fallback, _files, _live, _register
from tlp.registry._mlflow import is_http, map_mlflow_errors, open_client, retrying
from tlp.registry._moves import Mover
from tlp.registry._read import Reader
from tlp.registry._types import (
    CHAMPION,
    ModelVersion,
    ResolvedModel,
    check_alias,
    family_of,
    model_name,
    pin_alias,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from storage import MeasurementStore
    from tlp.core.settings import Settings

_VERSION: Final = re.compile(r"v?(\d+)")
_LOCK_TIMEOUT_S: Final = 60.0
T = TypeVar("T")


class Registry:
    """The registered models of this installation.

    Every method that asks MLflow raises `RegistryUnavailableError` (no answer), `RegistryError` (anything else that
    MLflow or its files do wrong), and `NotFoundError` for a model, version or alias that is not there. Instances may
    be used from any thread. MLflow is opened at the first call, so making one costs nothing.

    Args:
        settings: `mlflow_tracking_uri` says where; everything local lies under `home`.
        store: where alias moves are recorded; opened from `settings` when it is first needed if None.
    """

    def __init__(self, settings: Settings, store: MeasurementStore | None = None) -> None:
        self._settings = settings
        self._store = store
        self._opened: MlflowClient | None = None

    # -- versions ---------------------------------------------------------------------------------------------
    @staticmethod
    def model_name(family: str) -> str:
        """The registered model of an ISA family: `mtl-tlp-<family>`, or `felix-<family>` asked for under that name."""
        return model_name(family)

    def ensure(self) -> None:
        """Make the database file and the experiment if they are not there (about 6 s the first time)."""
        with self._mapped("preparing the registry"):
            self._experiment_id()

    def register(
        self,
        checkpoint_dir: Path,
        *,
        family: str,
        device: str | None = None,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, Any] | None = None,
        curves: Mapping[str, Sequence[float]] | None = None,
        tags: Mapping[str, Any] | None = None,
        figures: Sequence[Path] = (),
        report: Mapping[str, Any] | None = None,
        table: Mapping[str, Sequence[Any]] | None = None,
        page: str | None = None,
        run_name: str | None = None,
        feature_shape: tuple[int, int] | None = None,
        submission: str | None = None,
        at: float | None = None,
    ) -> int:
        """Register a checkpoint directory as the next version of the family's model and return its number.

        No alias is moved. A failure or a kill on the way leaves no version behind; with a `submission` the next call
        goes on with what is there, so that it may be repeated until it returns.

        Args:
            checkpoint_dir: what `Checkpoint.save` wrote; copied.
            device: the device the training was for; tag `trained_device`.
            metrics: final values, e.g. `top1`, `top5`, `loss`; `top1` and `top5` become tags of the version, too.
            params: training parameters.
            curves: values per epoch, e.g. `train_loss`; step 0 is the first epoch.
            tags: of the version and its run; structures become JSON. See `VersionFacts.to_tags`.
            figures: PNG files for the run's page.
            report: a dictionary for `report.json`.
            table: column → values; `gate.json`, which MLflow shows as a table.
            page: Markdown; the description of run and version.
            feature_shape: (L, E) of an encoded program, the only one the model then accepts; None: what the
                checkpoint's config.json says.
            submission: names this registration for good: called again with it, the version there is is returned.
            at: when the figures were made, seconds since the epoch; the same in every call of a submission.

        Raises:
            InvalidInputError: no such directory.
        """
        if not checkpoint_dir.is_dir():
            raise InvalidInputError(f"{checkpoint_dir} is not a checkpoint directory", next_command="tlp train")
        model = model_name(family)
        named: dict[str, Any] = {"family": family} | ({} if device is None else {"trained_device": device})
        named |= {key: f"{value:.6f}" for key, value in (metrics or {}).items() if key in ("top1", "top5")}
        what = _register.Submission(
            checkpoint_dir=checkpoint_dir,
            model=model,
            submission=submission or uuid.uuid4().hex,
            at=time.time() if at is None else at,
            run_name=run_name,
            metrics=metrics or {},
            params=params or {},
            curves=curves or {},
            tags={key: _register.tag_text(value) for key, value in (named | dict(tags or {})).items()},
            figures=figures,
            report=report,
            table=table,
            page=page,
            feature_shape=feature_shape,
        )
        with self._mapped(f"registering a version of {model}"):
            return _register.register_version(self._client, self._experiment_id(), what)

    def find_submission(self, family: str, submission: str) -> int | None:
        """The version that `register(submission=…)` made; None if it made none."""
        model = model_name(family)
        with self._mapped(f"looking for submission {submission} of {model}"):
            found = _register.find_version(self._client, model, submission)
            return None if found is None else int(found.version)

    def list_versions(self, family: str | None = None) -> list[ModelVersion]:
        """All versions of the family's model (of every family if None), newest first; [] if there is no model."""
        with self._mapped("listing model versions"):
            models = self._read.models() if family is None else [model_name(family)]
            return [version for model in models for version in self._read.versions(model)]

    def show(self, family: str, version: int) -> ModelVersion:
        """One version with its metrics. Raises NotFoundError naming the versions there are."""
        model = model_name(family)
        with self._mapped(f"reading version {version} of {model}"):
            found = self._read.get(model, version)
            metrics: Mapping[str, float] = {}
            if found.run_id is not None:
                metrics = dict(retrying(lambda: self._client.get_run(str(found.run_id))).data.metrics)
            return replace(found, metrics=metrics)

    def resolve(self, family: str, device: str | None = None, ref: str | int = CHAMPION) -> ResolvedModel:
        """The version to work with now, and its files.

        Args:
            device: its pin `champion-<device>` wins over `champion`; ignored if `ref` is something else.
            ref: `champion`, another alias, or a version number (`3`, `"3"`, `"v3"`).

        Raises:
            NotFoundError: no such version; an alias that points nowhere.
            RegistryError: its files are gone.
        """
        model = model_name(family)
        number = _VERSION.fullmatch(str(ref))
        with self._mapped(f"resolving {ref} of {model}"):
            if number:
                alias, version = None, int(number.group(1))
            else:
                alias, version = self._read.aim(model, str(ref), device)
            found = self._read.get(model, version)
            folder = _files.checkpoint_dir(self._client, self._settings, model, version)
            return ResolvedModel(model, version, alias, folder, found.tags)

    def usable(self, family: str, device: str | None, load: Callable[[ResolvedModel], T]) -> _fallback.UsableVersion[T]:
        """The version in force, loaded; if it cannot be, the newest earlier champion that can and was not rejected.

        "Cannot be" is: deleted, an alias that points nowhere, files that are gone, `load` raising RegistryError.

        Args:
            device: its pin wins over `champion`.
            load: makes of a version what the caller works with. Raises RegistryError.

        Raises:
            RegistryUnavailableError: MLflow does not answer.
            NotFoundError, RegistryError: why the version in force cannot be used; no earlier one can, either.
        """
        model = model_name(family)

        def earlier() -> list[int]:
            with self._mapped(f"looking for the last good version of {model}"):
                with suppress(BusyError), self._moving(family):
                    self._mover().reconcile(model)  # an alias that a person took away is a verdict
                return _fallback.last_good(self._events.model_events(model=model), self._read.versions(model), device)

        return _fallback.first_usable(
            model,
            lambda: self.resolve(family, device),
            earlier,
            lambda version: self.resolve(family, ref=version),
            load,
        )

    def champion_version(self, family: str) -> int | None:
        """Where `champion` points now; None: nowhere."""
        model = model_name(family)
        with self._mapped(f"looking for the champion of {model}"):
            return self._read.aliases(model).get(CHAMPION)

    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""
        model = model_name(family)
        with self._mapped(f"tagging version {version} of {model}"):
            self._mover().tag(model, version, key, _register.tag_text(value))

    # -- aliases ----------------------------------------------------------------------------------------------
    def promote(
        self,
        family: str,
        version: int,
        *,
        reason: str,
        by: Actor = Actor.PIPELINE,
        alias: str = CHAMPION,
    ) -> ModelEvent | None:
        """Move an alias to a version and record the move; None if it is there already.

        Moves that a person made meanwhile are recorded first. The pipeline does not promote a version tagged as
        rejected for that alias; a person may, and that takes the tag off. A person's move to an older version tags
        the version moved away from.

        Raises:
            NotFoundError: no such version.
            InvalidInputError: rejected (`by` is the pipeline), or not an alias.
        """
        model = model_name(family)
        check_alias(alias)
        with self._mapped(f"promoting version {version} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            return mover.move(model, alias, version, reason=reason, by=by)

    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move `champion` to a version that passed the gate, once, unless a person decided otherwise meanwhile.

        Args:
            judged_against: where `champion` pointed when the gate judged; None: nowhere.
            parent: the version the training started from; None: from scratch.

        Returns:
            Whether it was moved now; False if it was before (whatever became of it since).

        Raises:
            NotFoundError: no such version.
            InvalidInputError: `champion` points elsewhere by now, or the version or its parent was rejected.
        """
        model = model_name(family)
        with self._mapped(f"promoting version {version} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            moves = [e for e in self._events.model_events(model=model) if e.alias == CHAMPION]
            if any(e.to_version == str(version) for e in moves):
                return False
            now = self._read.aliases(model).get(CHAMPION)
            if now != judged_against:
                raise InvalidInputError(
                    f"version {version} of {model} was judged when champion was {_named(judged_against)}, and it is "
                    f"{_named(now)} by now: the next training is judged against that",
                    next_command=f"tlp model promote {version}",
                )
            if parent is not None and mover.is_rejected(model, parent):
                raise InvalidInputError(
                    f"version {version} of {model} was trained from version {parent}, which was rejected meanwhile",
                    next_command=f"tlp model promote {version}",
                )
            return mover.move(model, CHAMPION, version, reason=reason, by=Actor.PIPELINE) is not None

    def rollback(
        self,
        family: str,
        to: int | None = None,
        *,
        device: str | None = None,
        reason: str = "rolled back",
        by: Actor = Actor.PERSON,
    ) -> ModelEvent:
        """Move `champion` (with `device`: that device's pin) back and tag the version it was on as rejected.

        Args:
            to: version to go to; None: the champion before, from the recorded moves, left out what was deleted or
                rejected. After promoting 1, 2, 3, two rollbacks lead to 2 and then to 1.

        Raises:
            NotFoundError: there is nothing to go back to, or no version `to`.
            InvalidInputError: `to` is where the alias is already.
        """
        model = model_name(family)
        alias = CHAMPION if device is None else pin_alias(device)
        with self._mapped(f"rolling back {alias} of {model}"), self._moving(family):
            mover = self._mover()
            mover.reconcile(model)
            aliases = self._read.aliases(model)
            current = aliases.get(alias, aliases.get(CHAMPION))
            target = mover.previous(model, alias, current) if to is None else to
            if target == current:
                raise InvalidInputError(
                    f"{alias} of {model} is version {current} already", next_command="tlp model list"
                )
            return mover.move_back(model, alias, target, from_version=current, reason=reason, by=by)

    def reconcile(self, store: MeasurementStore | None = None) -> list[ModelEvent]:
        """Record every alias move that has no record and return the new records.

        A move that we had announced (`promote` was killed before it could record it) is recorded as ours, any other
        as a person's; the version a person moved back from is tagged as rejected, and one a person moved on to is no
        longer rejected. Call this before a champion is used or a promotion is decided.

        Args:
            store: another store than the registry's own.
        """
        if store is not None:
            return Registry(self._settings, store).reconcile()
        events = []
        with self._mapped("reconciling aliases"):
            for model in self._read.models():
                with self._moving(family_of(model)):
                    events += self._mover().reconcile(model)
        return events

    def log_live(self, family: str, device: str, *, versions: Sequence[str] | None = None) -> int:
        """Log the live quality of versions (all with rounds on the device if None) to the runs that made them.

        Returns:
            How many rounds were new to MLflow. Versions that are no longer registered are left out.
        """
        rounds: dict[str, list[RoundQuality]] = {}
        for row in self._events.round_qualities(device=device):
            rounds.setdefault(row.version, []).append(row)
        model, logged = model_name(family), 0
        with self._mapped(f"logging the live quality of {model} on {device}"):
            made_by = {str(found.version): found.run_id for found in self._read.versions(model)}
            for version, rows in rounds.items():
                run_id = made_by.get(version)
                if run_id is not None and (versions is None or version in versions):
                    logged += _live.log_rounds(self._client, run_id, device, rows)
        return logged

    def history(self, family: str | None = None) -> list[ModelEvent]:
        """Recorded alias moves, oldest first; of every family if None. Does not ask MLflow."""
        return self._events.model_events(model=None if family is None else model_name(family))

    def close_stale_runs(self) -> list[str]:
        """Close as KILLED the MLflow runs whose process on this host is dead; returns their ids."""
        closed = []
        with self._mapped("closing stale runs"):
            runs = retrying(
                lambda: self._client.search_runs(
                    [self._experiment_id()], "attributes.status = 'RUNNING'", max_results=1000
                )
            )
            for run in runs:
                owner = run.data.tags.get(_register.OWNER_TAG)
                if owner is not None and _process.is_gone(json.loads(owner)):
                    self._client.set_terminated(run.info.run_id, "KILLED")
                    closed.append(str(run.info.run_id))
        return closed

    # -- inside -----------------------------------------------------------------------------------------------
    @property
    def _client(self) -> MlflowClient:
        if self._opened is None:
            self._opened = open_client(self._settings)
        return self._opened

    @property
    def _events(self) -> MeasurementStore:
        if self._store is None:
            from storage import open_store

            self._store = open_store(self._settings.store_path)
        return self._store

    @property
    def _read(self) -> Reader:
        return Reader(self._client)

    def _mover(self) -> Mover:
        return Mover(self._client, self._events)

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        _ = self._client  # opened outside: what goes wrong there is named there
        with map_mlflow_errors(doing, uri=self._settings.mlflow_tracking_uri):
            yield

    @contextmanager
    def _moving(self, family: str) -> Iterator[None]:
        """One mover of a model's aliases at a time on this host; flock, so it dies with its holder."""
        path = self._settings.locks_dir / f"registry-{family}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S)
        try:
            lock.acquire()
        except filelock.Timeout as exc:
            raise BusyError(
                f"another process has been moving aliases of {model_name(family)} for {_LOCK_TIMEOUT_S:.0f} s ({path})",
                next_command="tlp status",
            ) from exc
        try:
            yield
        finally:
            lock.release()

    def _experiment_id(self) -> str:
        uri = self._settings.mlflow_tracking_uri
        artifacts = None if is_http(uri) else self._settings.mlflow_dir / "artifacts"
        return retrying(lambda: _register.ensure_experiment(self._client, artifacts, _register.EXPERIMENT))


def _named(version: int | None) -> str:
    return "nowhere" if version is None else f"version {version}"
