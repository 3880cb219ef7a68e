"""Rows of the measurement store: frozen dataclasses. A backend derives its columns from their fields.

Times are timezone-aware UTC datetimes, latencies seconds. A row that was returned never changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from types import UnionType
from typing import Any, get_args, get_type_hints

from storage.states import (
    Actor,
    CanaryState,
    DeviceState,
    MeasurementState,
    ReasonCode,
    RunKind,
    RunState,
    VersionState,
)

# Of a field that came after the first release: frames and Parquet files may lack its column (null).
LATER: Mapping[str, bool] = {"later": True}
DATASET = "dataset"  # endpoint kind of a platform of an imported data set; `tlp.measure.endpoint` has the others


def stable_id(*parts: str) -> str:
    """Content hash used as a key: the first 16 bytes of SHA-256 over the parts, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Device:
    """One piece of hardware programs are measured on.

    Attributes:
        name: `[a-z0-9][a-z0-9-_]{0,39}`.
        target: TVM target as a dict, e.g. `{"kind": "llvm", "mcpu": "znver3", "num-cores": 2}`.
        family: ISA family (`x86_64`, `aarch64`, `cuda`): one registered model each.
        min_samples: OK samples needed before the device becomes a task.
        facts: what was found at enrolment (CPU name, cores, versions, …).
        endpoint: how it is reached: `{"kind": "local"}`, `{"kind": "rpc", "tracker": …, "key": …}`, or
            `{"kind": "dataset"}` for a platform whose samples were imported and that cannot be measured here.
        state: the newest state in its history.
        enrolled_at: UTC.
    """

    name: str
    target: Mapping[str, Any]
    family: str
    min_samples: int
    facts: Mapping[str, Any]
    endpoint: Mapping[str, Any]
    state: DeviceState
    enrolled_at: datetime

    @property
    def has_hardware(self) -> bool:
        """Whether programs can be measured on it; a platform of an imported data set has samples only."""
        return self.endpoint.get("kind") != DATASET


@dataclass(frozen=True)
class DeviceEvent:
    """One change of a device's state, append-only."""

    device: str
    at: datetime
    state: DeviceState
    reason: str
    code: ReasonCode = ReasonCode.OTHER


@dataclass(frozen=True)
class Workload:
    """One subgraph (a TIR module).

    Attributes:
        workload_id: `stable_id("workload", content key)`; see `Workload.make` and `tlp.programs.workloads`.
        name: readable, e.g. `fused_conv2d_add_relu`.
        mod_json: the module in TVM's JSON (`tvm.ir.save_json`).
        structural_hash: as TVM prints it, decimal text.
        context: facts of the workload that an encoder may use: `{"flop": …, "args": [["float32", [1, 3, …]], …]}`.
    """

    workload_id: str
    name: str
    mod_json: str
    structural_hash: str
    context: Mapping[str, Any]

    @staticmethod
    def make(
        name: str, mod_json: str, structural_hash: str, context: Mapping[str, Any], *, key: str | None = None
    ) -> Workload:
        """A workload under its content key: `key` if the same subgraph can have several texts, else `mod_json`."""
        content = mod_json if key is None else key
        return Workload(stable_id("workload", content), name, mod_json, structural_hash, context)


@dataclass(frozen=True)
class NetworkTask:
    """A workload's part in a network: it occurs `weight` times."""

    workload_id: str
    task: str
    weight: int


@dataclass(frozen=True)
class Network:
    """A network and its tuning tasks.

    Attributes:
        holdout: held out from training and used for evaluation.
        source: how to build it again, e.g. `builtin:resnet_18`, `torch:pkg.mod:factory`, `dataset:starter`.
        tasks: the distinct subgraphs with their weights.
    """

    name: str
    holdout: bool
    source: str
    added_at: datetime
    tasks: tuple[NetworkTask, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """The schedule primitives of a design space with the decisions taken out.

    Attributes:
        sketch_id: `stable_id("sketch", workload_id, language, instructions_json)`.
        language: `metaschedule` or `ansor`.
        instructions_json: for `metaschedule`: JSON list of `[kind, inputs, attrs, outputs]`, everything before
            `EnterPostproc` (not included), with placeholders (`"$parallel"`) for what the target sets. See
            `tlp.language.sketch`.
        decision_width: number of integers in the decision vector of a program of this sketch.
        constants: (name, JSON text) of the target that the sketch is bound to, what `text` puts for `"$name"`; not
            stored. None: not bound.
        context: of its workload, as read from a store or a design space, for encoders; not a part of the sketch
            (it does not count in comparisons and is not stored with it). None: nobody looked it up.
    """

    sketch_id: str
    workload_id: str
    language: str
    instructions_json: str
    decision_width: int
    constants: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)
    context: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def text(self) -> str:
        """The instructions with the constants of the target in the placeholders' places."""
        text = self.instructions_json
        for name, value in self.constants or ():
            text = text.replace(f'"${name}"', value)
        return text

    @staticmethod
    def make(workload_id: str, language: str, instructions_json: str, decision_width: int) -> Sketch:
        """A sketch under its content key."""
        return Sketch(
            stable_id("sketch", workload_id, language, instructions_json),
            workload_id,
            language,
            instructions_json,
            decision_width,
        )


@dataclass(frozen=True)
class Program:
    """One program: a sketch and its decisions, flattened to integers (`tlp.language.sketch` gives the order)."""

    program_id: str
    sketch_id: str
    workload_id: str
    decisions: tuple[int, ...]

    @staticmethod
    def make(sketch: Sketch, decisions: Sequence[int]) -> Program:
        """A program under its content key."""
        values = tuple(int(d) for d in decisions)
        return Program(
            stable_id("program", sketch.sketch_id, ",".join(map(str, values))),
            sketch.sketch_id,
            sketch.workload_id,
            values,
        )


@dataclass(frozen=True)
class Measurement:
    """One program timed on one device.

    Attributes:
        run_secs: every repeat, seconds; empty unless OK.
        latency_s: what the repeats come to, between the least and the greatest of them; None unless OK.
        error: reason in one sentence; None if OK.
        canary_off: it was measured while the device's canary was off: kept, but training leaves it out. None: unknown.
    """

    measurement_id: str
    program_id: str
    device: str
    run_id: str
    at: datetime
    state: MeasurementState
    run_secs: tuple[float, ...] = ()
    latency_s: float | None = None
    error: str | None = None
    canary_off: bool | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class Canary:
    """One measurement of a device's canary kernel, append-only.

    The reference in force is the first REFERENCE row that is newer than the newest REBASE row.

    Attributes:
        run_id: run it was measured in; None for a person's REBASE.
        latency_s: median seconds; None for REBASE, and for a FAILED or OFF canary that did not run.
        dispersion: relative standard deviation between the measurements a reference is taken from; None otherwise.
        reference_s: the reference it was compared with, seconds; None unless STEADY or OFF.
        facts: what may explain a difference: kernel, TVM's version, target, repeats.
        reason: one sentence with the numbers.
    """

    canary_id: str
    device: str
    run_id: str | None
    at: datetime
    state: CanaryState
    latency_s: float | None
    dispersion: float | None
    reference_s: float | None
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasurementBatch:
    """What one transaction of a measuring run adds. What is known already is left alone."""

    sketches: Sequence[Sketch]
    programs: Sequence[Program]
    measurements: Sequence[Measurement]
    canaries: Sequence[Canary] = ()


@dataclass(frozen=True)
class Run:
    """One run of a flow. `owner` tells whether its process still lives (`storage/identity.py`)."""

    run_id: str
    kind: RunKind
    device: str | None
    params: Mapping[str, Any]
    owner: Mapping[str, Any]
    started_at: datetime
    state: RunState
    reason: str
    finished_at: datetime | None
    result: Mapping[str, Any] = field(default_factory=dict)
    code: ReasonCode = ReasonCode.OTHER


@dataclass(frozen=True)
class TuningResult:
    """The best program a tuning run knows for one task at the end of one round, append-only."""

    run_id: str
    network: str
    device: str
    workload_id: str
    at: datetime
    trials: int
    failed: int
    best_program_id: str | None
    best_latency_s: float | None
    model_version: str


@dataclass(frozen=True)
class ModelEvent:
    """One move of an alias, append-only. Versions are the registry's numbers as text; None: no version."""

    at: datetime
    model: str
    alias: str
    from_version: str | None
    to_version: str | None
    by: Actor
    reason: str
    code: ReasonCode = ReasonCode.OTHER


@dataclass(frozen=True)
class VersionEvent:
    """What became of a registered version, append-only; the newest is in force. `facts` go with REGISTERED."""

    at: datetime
    model: str
    version: str
    state: VersionState
    device: str | None  # it was trained for; of STAGED: it is tried on
    reason: str
    code: ReasonCode = ReasonCode.OTHER
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundQuality:
    """What a model predicted in one tuning round against what was measured, append-only.

    Attributes:
        version: of the model that scored, the registry's number as text.
        visit: rounds of this task before in the same budget.
        programs: OK programs of the round that had a score.
        pairs: pairs of them that are no tie, by how far their latencies lie apart, nearest first.
        pairs_right: of these, how many the model ranked right; a pair with equal scores counts half.
        ties: pairs left out, their latencies being too close.
        best_of: k → best latency of the round / best latency among the model's best k; 1 is perfect.
        canary_off: the round was measured while the canary was off; None: unknown.
    """

    run_id: str
    device: str
    version: str
    workload_id: str
    at: datetime
    visit: int
    programs: int
    pairs: tuple[int, ...]
    pairs_right: tuple[float, ...]
    ties: int
    best_of: Mapping[int, float]
    canary_off: bool | None = None


@dataclass(frozen=True)
class DeviceCounts:
    """Samples of a device so far.

    Attributes:
        samples_ok: OK measurements that training takes.
        samples_failed: measurements in an error state.
        samples_flagged: OK measurements made while the canary was off: kept, not trained on, not in `samples_ok`.
    """

    samples_ok: int
    samples_failed: int
    first_at: datetime | None
    last_at: datetime | None
    samples_flagged: int = 0


def field_types(row: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, without their `| None`."""
    hints = get_type_hints(row)
    return {field.name: _without_none(hints[field.name]) for field in dataclasses.fields(row)}


def _without_none(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
