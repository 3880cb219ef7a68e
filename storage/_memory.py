"""The in-memory store: the contract without a file. For tests and trials; nothing survives the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC

import polars as pl

from storage._frames import (
    BEST_COLUMNS,
    MEASUREMENT_SCHEMA,
    OUTCOME_COLUMNS,
    PROGRAM_SCHEMA,
    SAMPLE_COLUMNS,
    check_programs,
    check_value_or_error,
    conform,
    measurement_frame,
    program_frame,
)
from storage._memory_quality import MemoryQuality, checked_canaries
from storage._memory_runs import copy_json
from storage._quality_types import Canary
from storage._rows import (
    check_sketch,
    checked_device,
    checked_network,
    checked_workload,
    first_by,
    not_found,
    now_utc,
)
from storage._types import (
    Device,
    DeviceCounts,
    DeviceEvent,
    DeviceState,
    MeasurementBatch,
    MeasurementState,
    Network,
    ReasonCode,
    Sketch,
    Workload,
)
from storage.errors import AlreadyExistsError, InvalidInputError, NotFoundError

_OK = str(MeasurementState.OK)
_STEADY = ~pl.col("canary_off").fill_null(False)  # not flagged


class MemoryStore(MemoryQuality):
    """A `MeasurementStore` that lives in this process only."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[str, Device] = {}
        self._device_events: list[DeviceEvent] = []
        self._workloads: dict[str, Workload] = {}
        self._networks: dict[str, Network] = {}
        self._sketches: dict[str, Sketch] = {}
        self._programs = PROGRAM_SCHEMA.to_frame()
        self._measurements = pl.Schema({"seq": pl.Int64(), **MEASUREMENT_SCHEMA}).to_frame()

    def __repr__(self) -> str:
        return "MemoryStore()"

    # -- devices ----------------------------------------------------------------------------------------------
    def add_device(self, device: Device, reason: str) -> None:
        device = checked_device(device)
        with self._lock:
            if device.name in self._devices:
                raise AlreadyExistsError(
                    f"there is a device {device.name!r} already", next_command=f"tlp device show {device.name}"
                )
            self._devices[device.name] = device
            self._device_events.append(DeviceEvent(device.name, now_utc(), device.state, reason, ReasonCode.ENROLLED))

    def get_device(self, name: str) -> Device:
        with self._lock:
            if name not in self._devices:
                raise not_found("device", name, self._devices, "tlp device list")
            return _fresh_device(self._devices[name])

    def list_devices(self) -> list[Device]:
        with self._lock:
            return [_fresh_device(self._devices[name]) for name in sorted(self._devices)]

    def set_device_state(
        self,
        name: str,
        state: DeviceState,
        reason: str,
        *,
        code: ReasonCode = ReasonCode.OTHER,
        unretire: bool = False,
    ) -> DeviceState:
        with self._lock:
            device = self.get_device(name)
            if device.state is state or (device.state is DeviceState.RETIRED and not unretire):
                return device.state
            self._devices[name] = replace(device, state=state)
            self._device_events.append(DeviceEvent(name, now_utc(), state, reason, code))
            return state

    def device_events(self, name: str) -> list[DeviceEvent]:
        with self._lock:
            self.get_device(name)
            return [event for event in self._device_events if event.device == name]

    def device_counts(self) -> dict[str, DeviceCounts]:
        with self._lock:
            counts = {name: DeviceCounts(0, 0, None, None) for name in sorted(self._devices)}
            grouped = self._measurements.group_by("device").agg(
                ((pl.col("state") == _OK) & _STEADY).sum().alias("ok"),
                (pl.col("state") != _OK).sum().alias("failed"),
                pl.col("at").min().alias("first_at"),
                pl.col("at").max().alias("last_at"),
                ((pl.col("state") == _OK) & ~_STEADY).sum().alias("flagged"),
            )
        for device, ok, failed, first_at, last_at, flagged in grouped.rows():
            counts[device] = DeviceCounts(ok, failed, first_at.astimezone(UTC), last_at.astimezone(UTC), flagged)
        return counts

    # -- workloads and networks -------------------------------------------------------------------------------
    def add_network(self, network: Network, workloads: Sequence[Workload]) -> None:
        network = checked_network(network)
        with self._lock:
            if network.name in self._networks:
                raise AlreadyExistsError(
                    f"there is a network {network.name!r} already", next_command="tlp network list"
                )
            fresh = self._new_workloads(workloads)
            unknown = {t.workload_id for t in network.tasks} - self._workloads.keys() - fresh.keys()
            if unknown:
                raise InvalidInputError(f"network {network.name} uses the unknown workload {min(unknown)}")
            self._workloads.update(fresh)
            self._networks[network.name] = network

    def add_workloads(self, workloads: Sequence[Workload]) -> int:
        with self._lock:
            fresh = self._new_workloads(workloads)
            self._workloads.update(fresh)
            return len(fresh)

    def _new_workloads(self, workloads: Iterable[Workload]) -> dict[str, Workload]:
        wanted = first_by(workloads, "workload_id")
        return {key: checked_workload(w) for key, w in wanted.items() if key not in self._workloads}

    def get_network(self, name: str) -> Network:
        with self._lock:
            if name not in self._networks:
                raise not_found("network", name, self._networks, "tlp network list")
            return self._networks[name]

    def list_networks(self) -> list[Network]:
        with self._lock:
            return [self._networks[name] for name in sorted(self._networks)]

    def get_workloads(self, workload_ids: Sequence[str] | None = None) -> list[Workload]:
        with self._lock:
            for workload_id in workload_ids or ():
                if workload_id not in self._workloads:
                    raise NotFoundError(f"no workload {workload_id!r} in the store", next_command="tlp network list")
            wanted = self._workloads if workload_ids is None else workload_ids
            return [checked_workload(self._workloads[workload_id]) for workload_id in wanted]

    # -- programs and measurements ----------------------------------------------------------------------------
    def add_measurements(self, batch: MeasurementBatch) -> int:
        return self.add_measurement_frames(
            program_frame(batch.programs),
            measurement_frame(batch.measurements),
            sketches=batch.sketches,
            canaries=batch.canaries,
        )

    def add_measurement_frames(
        self,
        programs: pl.DataFrame,
        measurements: pl.DataFrame,
        *,
        sketches: Sequence[Sketch] = (),
        canaries: Sequence[Canary] = (),
        landed: Sequence[str] = (),
    ) -> int:
        programs = conform(programs, PROGRAM_SCHEMA, "programs").unique("program_id", keep="first", maintain_order=True)
        measurements = conform(measurements, MEASUREMENT_SCHEMA, "measurements")
        check_programs(programs)
        check_value_or_error(measurements)
        measurements = measurements.unique("measurement_id", keep="first", maintain_order=True)
        with self._lock:
            self._check_owners(measurements, finished=bool(landed))
            new_canaries = checked_canaries(canaries, self._devices)
            new_sketches = self._new_sketches(sketches)
            new_programs = programs.join(self._programs, on="program_id", how="anti", maintain_order="left")
            self._check_programs(new_programs, {**self._sketches, **new_sketches})
            all_programs = pl.concat([self._programs, new_programs])
            unknown = measurements.join(all_programs, on="program_id", how="anti", maintain_order="left")
            if unknown.height:
                raise InvalidInputError(f"measurements of the unknown program {unknown['program_id'][0]!r}")
            new = measurements.join(self._measurements, on="measurement_id", how="anti", maintain_order="left")
            start = self.watermark() + 1
            numbered = new.select(pl.int_range(start, start + new.height, dtype=pl.Int64).alias("seq"), pl.all())
            # Nothing can fail any more: all of it, or nothing.
            self._sketches.update(new_sketches)
            self._programs = all_programs
            self._measurements = pl.concat([self._measurements, numbered])
            self._keep_canaries(new_canaries)
            self._landed.update(landed)
            return new.height

    def _check_owners(self, measurements: pl.DataFrame, *, finished: bool) -> None:
        for run_id in measurements["run_id"].unique(maintain_order=True):
            run = self._runs.get(run_id)
            if run is None:
                raise InvalidInputError(f"measurements of the unknown run {run_id!r}")
            if run.state.is_finished() and not finished:
                raise InvalidInputError(f"run {run_id} is finished ({run.state}) and takes no more measurements")
        for name in measurements["device"].unique(maintain_order=True):
            if name not in self._devices:
                raise InvalidInputError(
                    f"measurements of the unknown device {name!r}", next_command=f"tlp device enroll {name}"
                )

    def _check_programs(self, programs: pl.DataFrame, sketches: Mapping[str, Sketch]) -> None:
        for program_id, sketch_id, workload_id, decisions in programs.iter_rows():
            sketch = sketches.get(sketch_id)
            if sketch is None:
                raise InvalidInputError(f"program {program_id} has the unknown sketch {sketch_id}")
            if sketch.workload_id != workload_id:
                raise InvalidInputError(f"program {program_id} and its sketch {sketch_id} name different workloads")
            if len(decisions) != sketch.decision_width:
                raise InvalidInputError(
                    f"program {program_id} has {len(decisions)} decisions, its sketch {sketch_id} takes "
                    f"{sketch.decision_width}"
                )

    def add_sketches(self, sketches: Sequence[Sketch]) -> int:
        with self._lock:
            fresh = self._new_sketches(sketches)
            self._sketches.update(fresh)
            return len(fresh)

    def _new_sketches(self, sketches: Iterable[Sketch]) -> dict[str, Sketch]:
        fresh = {key: s for key, s in first_by(sketches, "sketch_id").items() if key not in self._sketches}
        unknown = {s.workload_id for s in fresh.values()} - self._workloads.keys()
        if unknown:
            raise InvalidInputError(f"{len(unknown)} workload(s) of sketches are unknown, e.g. {min(unknown)}")
        for sketch in fresh.values():
            check_sketch(sketch)
        return fresh

    def get_sketches(
        self, sketch_ids: Sequence[str] | None = None, *, workload_ids: Sequence[str] | None = None
    ) -> list[Sketch]:
        with self._lock:
            return [
                replace(self._sketches[key], context=self._workloads[self._sketches[key].workload_id].context)
                for key in sorted(self._sketches)
                if (sketch_ids is None or key in sketch_ids)
                and (workload_ids is None or self._sketches[key].workload_id in workload_ids)
            ]

    def programs(self, *, devices: Sequence[str] | None = None) -> pl.DataFrame:
        with self._lock:
            if devices is None:
                return self._programs.clone()
            measured = self._measurements.filter(pl.col("device").is_in(list(devices)))
            return self._programs.join(measured, on="program_id", how="semi", maintain_order="left")

    def watermark(self) -> int:
        with self._lock:
            return self._measurements.height

    def samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        workload_ids: Sequence[str] | None = None,
        flagged: bool = False,
    ) -> pl.DataFrame:
        condition = (pl.col("state") == _OK) & (pl.col("seq") > after)
        if not flagged:
            condition &= _STEADY
        if watermark is not None:
            condition &= pl.col("seq") <= watermark
        if devices is not None:
            condition &= pl.col("device").is_in(list(devices))
        if workload_ids is not None:
            condition &= pl.col("workload_id").is_in(list(workload_ids))
        return self._joined().filter(condition).select(SAMPLE_COLUMNS)

    def _joined(self) -> pl.DataFrame:
        with self._lock:
            return self._measurements.join(self._programs, on="program_id", how="left", maintain_order="left")

    def iter_samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        batch_rows: int = 100_000,
        flagged: bool = False,
    ) -> Iterator[pl.DataFrame]:
        if batch_rows < 1:
            raise InvalidInputError(f"batch_rows is {batch_rows}; at least 1")
        frame = self.samples(devices=devices, watermark=watermark, after=after, flagged=flagged)
        return frame.iter_slices(batch_rows)

    def sample_languages(self, *, watermark: int | None = None) -> dict[str, dict[str, int]]:
        frame = self.samples(watermark=watermark)
        with self._lock:
            found: dict[str, dict[str, int]] = {name: {} for name in sorted(self._devices)}
            languages = {key: sketch.language for key, sketch in self._sketches.items()}
        column = pl.col("sketch_id").replace_strict(languages, return_dtype=pl.String).alias("language")
        counts = frame.select("device", column).group_by("device", "language").len().sort("device", "language")
        for device, language, count in counts.iter_rows():
            found[device][language] = count
        return found

    def measurements(
        self,
        *,
        device: str | None = None,
        run_id: str | None = None,
        states: Sequence[str] | None = None,
        newest: int | None = None,
    ) -> pl.DataFrame:
        condition = pl.lit(True)
        if device is not None:
            condition &= pl.col("device") == device
        if run_id is not None:
            condition &= pl.col("run_id") == run_id
        if states is not None:
            condition &= pl.col("state").is_in([str(state) for state in states])
        found = self._joined().filter(condition).select(OUTCOME_COLUMNS)
        return found if newest is None else found.tail(newest)

    def measured_program_ids(self, device: str, workload_id: str) -> set[str]:
        rows = self._joined().filter((pl.col("device") == device) & (pl.col("workload_id") == workload_id))
        return set(rows["program_id"])

    def best_programs(self, device: str, workload_ids: Sequence[str], *, top: int = 1) -> pl.DataFrame:
        wanted = pl.DataFrame(
            {"workload_id": list(dict.fromkeys(workload_ids))}, schema={"workload_id": pl.String}
        ).with_row_index("place")
        with self._lock:
            timed = self._joined().filter(
                (pl.col("state") == _OK)
                & (pl.col("device") == device)
                & pl.col("workload_id").is_in(list(workload_ids))
            )
            order = self._programs.select("program_id").with_row_index("program_no")
        return (
            timed.group_by("program_id", maintain_order=True)
            .agg(
                pl.col("workload_id", "sketch_id", "decisions").first(),
                pl.coalesce(pl.col("latency_s").filter(_STEADY).median(), pl.col("latency_s").median()),
                (~_STEADY).all().alias("canary_off"),
            )
            .join(order, on="program_id", how="left", maintain_order="left")
            .join(wanted, on="workload_id", how="inner", maintain_order="left")
            .sort("place", "canary_off", "latency_s", "program_no")
            .filter(pl.int_range(pl.len()).over("place") < top)
            .select(BEST_COLUMNS)
        )


def _fresh_device(device: Device) -> Device:
    return replace(
        device, target=copy_json(device.target), facts=copy_json(device.facts), endpoint=copy_json(device.endpoint)
    )
