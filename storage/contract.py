"""The contract every measurement store keeps, as prose and then as types, and the table of backends that keep it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import InvalidInputError
from storage.rows import (
    Canary,
    Device,
    DeviceCounts,
    DeviceEvent,
    MeasurementBatch,
    ModelEvent,
    Network,
    RoundQuality,
    Run,
    Sketch,
    TuningResult,
    VersionEvent,
    Workload,
)
from storage.states import DeviceState, ReasonCode, RunKind, RunState

if TYPE_CHECKING:
    import polars as pl


class MeasurementStore(ABC):
    """Devices, workloads, programs, measurements, runs, tuning results and model events.

    **Append-only.** Nothing that was measured, decided or moved is ever changed or deleted. A device's state and a
    run's outcome are further rows (events); the newest is in force. A run is finished once: finishing it again, or
    adding measurements to it afterwards, raises `InvalidInputError`.

    **Content keys.** Workloads, sketches and programs are named by a hash of their content, so adding one twice adds
    nothing. Measurements carry a unique `measurement_id` made by the caller: handing the same batch in twice (a retry
    after a lost acknowledgement) stores each row once.

    **Atomic.** Each method is one transaction: after an exception, or after `kill -9` at any moment, all of it is
    there or nothing. When `add_measurements` has returned, the batch survives the death of the process.

    **Value or error.** A measurement is OK with finite positive `run_secs` and `latency_s`, or one of the error states
    with a reason and no latency. Anything else, e.g. a sentinel of 1e10 s or NaN, is refused with
    `InvalidInputError` and nothing of the batch is stored.

    **Flagged.** A measurement with `canary_off` was made while the device's canary kernel ran at another speed than its
    reference. It is kept like any other; what training reads (`samples`, `iter_samples`, `sample_languages`) leaves it
    out unless asked with `flagged=True`, and `best_programs` takes it only where there is nothing better. Null, of
    rows from before there were canaries and of imports, counts as not flagged.

    **Watermark.** Every measurement gets a sequence number that grows in commit order. `watermark()` is the largest;
    `samples(watermark=w)` returns the same rows for the same `w` for ever. This is what a training run records.

    **Many processes.** Any number of processes may use one store at once. A writer holds the store only for the length
    of one method call; readers and writers wait for each other with a bound (`StoreLockedError` names the holder's
    process id). Instances hold no lock and no connection between calls, and may be used from any thread.

    **Returned rows** are frozen and never change; frames are the caller's own copies.

    **Errors.** `StoreVersionError` if a newer release wrote the store, `StoreCorruptError` if the file is no store
    or is damaged, `StoreLockedError` as above, `NotFoundError` / `AlreadyExistsError` for names,
    `InvalidInputError` for values. Nothing else escapes.
    """

    @property
    def folder(self) -> Path | None:
        """The local folder that the store lies in; None if it has none."""
        return None

    # -- devices ----------------------------------------------------------------------------------------------
    @abstractmethod
    def add_device(self, device: Device, reason: str) -> None:
        """Enroll a device; its first event is `device.state` with `reason`, ENROLLED. Raises AlreadyExistsError."""

    @abstractmethod
    def get_device(self, name: str) -> Device:
        """The device, state included. Raises NotFoundError naming the devices there are."""

    @abstractmethod
    def list_devices(self) -> list[Device]:
        """All devices by name."""

    @abstractmethod
    def set_device_state(
        self,
        name: str,
        state: DeviceState,
        reason: str,
        *,
        code: ReasonCode = ReasonCode.OTHER,
        unretire: bool = False,
    ) -> DeviceState:
        """Append a device event; a no-op if the device is in `state` already, or is RETIRED.

        A person retires a device, so work that is under way must not undo it: only `unretire` leaves that state. It is
        looked at in the same transaction. Returns the state the device is in now. Raises NotFoundError.
        """

    @abstractmethod
    def device_events(self, name: str) -> list[DeviceEvent]:
        """The device's history, oldest first."""

    @abstractmethod
    def device_counts(self) -> dict[str, DeviceCounts]:
        """Samples per device, every device included."""

    # -- workloads and networks -------------------------------------------------------------------------------
    @abstractmethod
    def add_network(self, network: Network, workloads: Sequence[Workload]) -> None:
        """Add a network and those of its workloads that are new. Raises AlreadyExistsError, InvalidInputError."""

    @abstractmethod
    def add_workloads(self, workloads: Sequence[Workload]) -> int:
        """Add workloads that are new; returns how many were."""

    @abstractmethod
    def get_network(self, name: str) -> Network:
        """The network with its tasks. Raises NotFoundError naming the networks there are."""

    @abstractmethod
    def list_networks(self) -> list[Network]:
        """All networks by name, tasks included."""

    @abstractmethod
    def get_workloads(self, workload_ids: Sequence[str] | None = None) -> list[Workload]:
        """Those workloads (all if None), in the order asked for. Raises NotFoundError."""

    # -- programs and measurements ----------------------------------------------------------------------------
    @abstractmethod
    def add_measurements(self, batch: MeasurementBatch) -> int:
        """Store one batch; returns how many measurements were new (a repeated measurement_id is not).

        Raises InvalidInputError (a row breaks value-or-error; an unknown program, sketch, workload, device or run; a
        finished run; decisions that are not as many as the sketch has).
        """

    @abstractmethod
    def add_measurement_frames(
        self,
        programs: pl.DataFrame,
        measurements: pl.DataFrame,
        *,
        sketches: Sequence[Sketch] = (),
        canaries: Sequence[Canary] = (),
        landed: Sequence[str] = (),
    ) -> int:
        """`add_measurements` for rows that come in columns (importers): the same rules, one transaction.

        `landed` names the landing files the rows come from: they are noted in the same transaction (`landed_files`),
        and as their rows were measured before, the runs may be finished by now.

        Columns of `programs`: program_id, sketch_id, workload_id (String), decisions List(Int32); of `measurements`:
        measurement_id, program_id, device, run_id, state, error (String), at Datetime(us, UTC),
        run_secs List(Float64), latency_s Float64, and canary_off Boolean, which may be left out (null). A program may
        be left out if it is known.
        """

    @abstractmethod
    def add_sketches(self, sketches: Sequence[Sketch]) -> int:
        """Add sketches that are new; returns how many were. Raises InvalidInputError for an unknown workload."""

    @abstractmethod
    def get_sketches(
        self, sketch_ids: Sequence[str] | None = None, *, workload_ids: Sequence[str] | None = None
    ) -> list[Sketch]:
        """Those sketches with their workloads' context (all if neither is given), by sketch_id.

        Unknown ids are left out.
        """

    @abstractmethod
    def programs(self, *, devices: Sequence[str] | None = None) -> pl.DataFrame:
        """Programs measured on any of those devices (all programs if None), in the order they were added.

        Columns: program_id, sketch_id, workload_id (String), decisions List(Int32).
        """

    @abstractmethod
    def watermark(self) -> int:
        """The sequence number of the newest measurement; 0 if there is none."""

    @abstractmethod
    def samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        workload_ids: Sequence[str] | None = None,
        flagged: bool = False,
    ) -> pl.DataFrame:
        """OK measurements with `after < seq <= watermark`, ordered by seq; with `flagged` those with `canary_off`, too.

        Columns: seq Int64, measurement_id, device, workload_id, sketch_id, program_id (String), decisions List(Int32),
        latency_s Float64, at Datetime(us, UTC). For use with `iter_samples` when they may not fit memory.
        """

    @abstractmethod
    def iter_samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        batch_rows: int = 100_000,
        flagged: bool = False,
    ) -> Iterator[pl.DataFrame]:
        """The same rows in the same order, at most `batch_rows` at a time, the store free between two frames."""

    @abstractmethod
    def programs_with_latency(
        self,
        *,
        devices: Sequence[str],
        watermark: int | None = None,
        workload_ids: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        """One row per program and device with the median latency of its samples (not flagged) up to `watermark`.

        Ordered by workload, program, device. Columns: device, workload_id, sketch_id, program_id (String), decisions
        List(Int32), latency_s Float64 (the median), samples Int64 (how many), seq Int64 (of the first).
        """

    @abstractmethod
    def sample_languages(self, *, watermark: int | None = None) -> dict[str, dict[str, int]]:
        """OK samples, not flagged, of each device by schedule language (`Sketch.language`), every device included.

        Languages without samples are left out; `{"cpu0": {"ansor": 24, "metaschedule": 500}, "cpu1": {}}`.
        """

    @abstractmethod
    def measurements(
        self,
        *,
        device: str | None = None,
        run_id: str | None = None,
        states: Sequence[str] | None = None,
        newest: int | None = None,
    ) -> pl.DataFrame:
        """All measurements, failures included, ordered by seq; with `newest` no more than so many, the last ones.

        Columns of `samples` (without `decisions`) and run_id, state, error (String), run_secs List(Float64), canary_off
        Boolean.
        """

    @abstractmethod
    def measured_program_ids(self, device: str, workload_id: str) -> set[str]:
        """Programs of the workload that were measured on the device, failures included."""

    @abstractmethod
    def best_programs(self, device: str, workload_ids: Sequence[str], *, top: int = 1) -> pl.DataFrame:
        """The fastest programs per workload on that device (the device's own rows only), fastest first.

        A program measured several times counts with the median latency of its measurements that are not flagged. One
        that has only flagged ones comes after all others of its workload, with the median of these and `canary_off`
        true: some latency is better than none, but it must not beat one that was measured on a steady machine.
        Columns: workload_id, program_id, sketch_id (String), decisions List(Int32), latency_s Float64, canary_off
        Boolean.
        """

    # -- canaries, quality of rounds, landing files ---------------------------------------------------------------
    @abstractmethod
    def add_canaries(self, canaries: Sequence[Canary]) -> None:
        """Append canaries; one whose `canary_id` is known is left alone. Measured ones come with their batch.

        Raises InvalidInputError (unknown device; latency, dispersion or reference that is no finite number of its
        kind; a time without zone).
        """

    @abstractmethod
    def canaries(self, *, device: str | None = None, limit: int | None = None) -> list[Canary]:
        """Canaries in the order they were added, newest first."""

    @abstractmethod
    def canary_reference(self, device: str) -> Canary | None:
        """The reference in force (see `Canary`); None if the next canary will be it."""

    @abstractmethod
    def add_round_qualities(self, rounds: Sequence[RoundQuality], shadows: Sequence[RoundQuality] = ()) -> None:
        """Append the quality of tuning rounds. Raises InvalidInputError for counts that cannot be.

        `shadows`: what another version says of the programs of those rounds, which it did not propose.
        """

    @abstractmethod
    def round_qualities(
        self,
        *,
        device: str | None = None,
        version: str | None = None,
        run_id: str | None = None,
        shadow: bool = False,
    ) -> list[RoundQuality]:
        """Qualities of rounds, oldest first; with `shadow` those of versions that did not propose the programs."""

    @abstractmethod
    def landed_files(self, names: Sequence[str]) -> set[str]:
        """Those of the landing files whose rows are in the store."""

    # -- runs -------------------------------------------------------------------------------------------------
    @abstractmethod
    def start_run(
        self,
        kind: RunKind,
        *,
        device: str | None,
        params: Mapping[str, Any],
        owner: Mapping[str, Any],
        run_id: str | None = None,
    ) -> str:
        """Open a run in state RUNNING and return its id: the one given (new), or a UUID4 hex."""

    @abstractmethod
    def finish_run(
        self,
        run_id: str,
        state: RunState,
        reason: str,
        result: Mapping[str, Any] | None = None,
        *,
        code: ReasonCode | None = None,
    ) -> None:
        """Close a run; without `code` it gets the one of its state (DONE: DONE, SKIPPED: NOTHING_TO_DO, …).

        Raises NotFoundError, InvalidInputError (finished already, or `state` is RUNNING).
        """

    @abstractmethod
    def get_run(self, run_id: str) -> Run:
        """The run. Raises NotFoundError."""

    @abstractmethod
    def list_runs(
        self,
        *,
        kind: RunKind | None = None,
        state: RunState | None = None,
        device: str | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """Runs, newest first."""

    # -- tuning and models ------------------------------------------------------------------------------------
    @abstractmethod
    def add_tuning_results(self, results: Sequence[TuningResult]) -> None:
        """Append the outcome of a tuning round."""

    @abstractmethod
    def tuning_results(
        self, *, network: str | None = None, device: str | None = None, run_id: str | None = None
    ) -> list[TuningResult]:
        """Tuning results, oldest first."""

    @abstractmethod
    def add_model_event(self, event: ModelEvent) -> None:
        """Append a move of an alias."""

    @abstractmethod
    def model_events(self, *, model: str | None = None, alias: str | None = None) -> list[ModelEvent]:
        """Alias moves, oldest first."""

    @abstractmethod
    def add_version_event(self, event: VersionEvent) -> None:
        """Append what became of a version."""

    @abstractmethod
    def version_events(self, *, model: str | None = None, version: str | None = None) -> list[VersionEvent]:
        """What became of versions, oldest first."""


# Scheme → module with `open_url(rest, lock_timeout_s)`; imported when asked for, `import storage` must stay cheap.
BACKENDS = {"duckdb": "storage.duckdb"}


def open_store(url: str, lock_timeout_s: float = 60.0) -> MeasurementStore:
    """The store at a URL, made if there is none.

    Args:
        url: `duckdb:///absolute/path/store.duckdb` (taken literally, without %-escapes) or `duckdb::memory:`.
        lock_timeout_s: longest time a call waits for other processes, seconds.

    Raises:
        InvalidInputError: no backend has that scheme.
        StoreError: and its subclasses, see `MeasurementStore`.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in BACKENDS:
        raise InvalidInputError(f"no store has the URL {url!r}; there are {', '.join(f'{name}:' for name in BACKENDS)}")
    store: MeasurementStore = import_module(BACKENDS[scheme]).open_url(rest, lock_timeout_s)
    return store
