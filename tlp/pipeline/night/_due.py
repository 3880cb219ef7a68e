"""Which networks are due on which devices, in which order, and how a night's budget is shared among them.

A pair of network and device is due if

1. its last tuning run with the champion was interrupted or killed: that run is resumed;
2. it was never tuned with a champion;
3. the champion of the device is another version than the one its last run ended with;
4. its runs with that version have measured fewer than `tune_trials` programs, and the last one did not end because the
   network was flat or its design spaces held no more.

Order: interrupted runs first (their design spaces are half searched), then pairs that were never tuned, then the
longest ago. Not by expected gain: what a new version will bring is not known before it was tried, a pair that gains
nothing ends flat and leaves its part of the budget to the others, and whoever waited tonight is first tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any, Final

from storage import DeviceState, MeasurementStore, Network, ReasonCode, Run, RunKind, RunState
from tlp.core.errors import RegistryError, RegistryUnavailableError, UserError
from tlp.core.fleet import Fleet
from tlp.core.registry import CHAMPION
from tlp.fleet import states
from tlp.pipeline.night._common import why_no_work
from tlp.search.tuning import find_resumable

_USED_UP: Final = (ReasonCode.FLAT, ReasonCode.EXHAUSTED)  # another run with the same champion gains nothing
_DATASET: Final = "dataset"
_INTERRUPTED: Final = (RunState.INTERRUPTED, RunState.CRASHED)


@dataclass(frozen=True)
class Pair:
    """A network on a device.

    Attributes:
        due: it is to be tuned.
        reason: one sentence with the numbers.
        numbers: what the sentence was made from: `trials`, `tune_trials`, `version` (of the last run), `champion`.
        resume: by going on with its last run.
        need: programs it still lacks; 0 if it is not due.
        least: programs that give each of its tasks one round.
        spent: of a run that is resumed: programs that earlier parts measured.
        last_at: when its last run with a champion began, UTC; None: never.
    """

    network: str
    device: str
    due: bool
    reason: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    need: int = 0
    least: int = 0
    spent: int = 0
    last_at: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values; `last_at` as ISO 8601."""
        keys = ("network", "device", "due", "reason", "resume", "need")
        last_at = None if self.last_at is None else self.last_at.isoformat()
        return {key: getattr(self, key) for key in keys} | {"numbers": dict(self.numbers), "last_at": last_at}


@dataclass(frozen=True)
class Decided:
    """What a night could do."""

    pairs: tuple[Pair, ...]  # every tunable network on every tunable device; due ones first, in their order
    left_out: Mapping[str, str]  # name of a device or network → why it is in no pair

    @property
    def due(self) -> tuple[Pair, ...]:
        """Those that are due, in their order."""
        return tuple(pair for pair in self.pairs if pair.due)


def decide(fleet: Fleet, *, device: str | None = None, network: str | None = None, probe: bool = False) -> Decided:
    """Look at every network on every device, or only at those named.

    With `probe`, quarantined devices whose probe is due are probed; what answers is back in work.

    Raises:
        NotFoundError: no such device or network.
        RegistryUnavailableError: MLflow does not answer, and there is no device whose version is known without it.
    """
    devices = fleet.store.list_devices() if device is None else [fleet.store.get_device(device)]
    networks = fleet.store.list_networks() if network is None else [fleet.store.get_network(network)]
    left_out = {f"network {row.name}": why for row in networks if (why := _no_network(row))}
    tunable = [row for row in networks if f"network {row.name}" not in left_out]
    pairs: list[Pair] = []
    outage: RegistryUnavailableError | None = None
    for row in devices:
        why, champion = why_no_work(fleet, row, probe=probe), ""
        if why is None:
            try:
                champion, why = _champion(fleet, row.name)
            except (RegistryError, UserError) as exc:
                why = f"no version to tune with: {exc.message}"
                outage = exc if isinstance(exc, RegistryUnavailableError) else outage
        if why is not None:
            left_out[f"device {row.name}"] = why
            continue
        tuned = _runs_by_network(fleet.store, row.name)
        pairs += [_decide(fleet, each, row.name, tuned.get(each.name, []), champion) for each in tunable]
    if outage is not None and not pairs:
        raise outage
    return Decided(tuple(sorted(pairs, key=_order)), left_out)


def plan(pairs: Sequence[Pair], budget: int, *, first: bool = True) -> list[int]:
    """Programs for each pair, in their order; 0 for one that has to wait for another night.

    Each gets what it needs, at most an equal part of what is left for it and those behind it; less than one round per
    task is not worth opening its design spaces. What one leaves falls to those behind it.

    Args:
        budget: programs for all of them; below 0 (a killed part of the night spent more than that) is as 0.
        first: the first may have all there is, however few: a network larger than the budget must have its turn, too.
    """
    shares: list[int] = []
    budget = max(budget, 0)
    for index, pair in enumerate(pairs):
        fair = max(budget // (len(pairs) - index), pair.least)
        share = min(pair.need, fair)
        if share > budget:
            share = budget if first and index == 0 else 0
        shares.append(share)
        budget -= share
    return shares


def _order(pair: Pair) -> tuple[Any, ...]:
    at = 0.0 if pair.last_at is None else pair.last_at.timestamp()
    return not pair.due, not pair.resume, pair.last_at is not None, at, pair.network, pair.device


def _no_network(network: Network) -> str | None:
    if network.source.partition(":")[0] == _DATASET:
        return f"came with the data set {network.source.partition(':')[2]}: nothing to compile"
    return None if network.tasks else "no tasks"


def _champion(fleet: Fleet, name: str) -> tuple[str, str | None]:
    """The version in force on a device, and why it cannot be tuned for, if it is not served.

    It is served if its state says so, or if a person moved the champion to a version that has a head for it.
    """
    device = fleet.store.get_device(name)  # a probe may have brought it back
    version = fleet.registry.usable(device.family, name, lambda resolved: resolved)
    state = states.state_before(fleet.store, name, *states.BUSY) if device.state in states.BUSY else device.state
    if state is DeviceState.SERVING or name in version.loaded.devices:
        return str(version.version), None
    without = f"version {version.version} has no head for it (tlp bootstrap {name})"
    return str(version.version), f"it is {device.state}, and {without}"


def _runs_by_network(store: MeasurementStore, device: str) -> dict[str, list[Run]]:
    """Network → its tuning runs on a device, newest first."""
    tuned: dict[str, list[Run]] = {}
    for run in store.list_runs(kind=RunKind.TUNE, device=device):
        tuned.setdefault(str(run.params.get("network")), []).append(run)
    return tuned


def _decide(fleet: Fleet, network: Network, device: str, tuned: Sequence[Run], champion: str) -> Pair:
    """The pair with its reason, from its runs (newest first, with any model) and the version in force."""
    name, goal = network.name, fleet.settings.tune_trials
    with_champion = [run for run in tuned if run.params.get("model") == CHAMPION]
    numbers: dict[str, Any] = {"trials": 0, "tune_trials": goal, "version": None, "champion": champion}
    least = fleet.settings.tune_batch * len(network.tasks)
    last_at = with_champion[0].started_at if with_champion else None

    def pair(due: bool, reason: str, need: int = 0, *, resume: bool = False, spent: int = 0) -> Pair:
        return Pair(name, device, due, f"{name} on {device}: {reason}", numbers, resume, need, least, spent, last_at)

    if tuned and tuned[0].state is RunState.RUNNING:
        return pair(False, f"run {tuned[0].run_id[:8]} is tuning it")
    if with_champion and with_champion[0] is tuned[0] and tuned[0].state in _INTERRUPTED:
        total = int(tuned[0].params.get("trials", goal))
        parts = find_resumable(fleet.store, name, device).run_ids
        spent = len(set().union(*(_programs(fleet.store, run_id) for run_id in parts)))
        numbers |= {"trials": spent, "tune_trials": total, "version": _ended_with(fleet.store, tuned[0])}
        how = "was killed" if tuned[0].state is RunState.CRASHED else "was interrupted"
        text = f"run {tuned[0].run_id[:8]} {how} after {spent} of {total} programs"
        return pair(True, text, max(total - spent, 0), resume=True, spent=spent)
    resumed = {run.params.get("resumed_from") for run in with_champion}
    whole = [run for run in with_champion if run.run_id not in resumed and _measured(fleet.store, run)]
    if not whole:
        other = f" (its last run was with {tuned[0].params.get('model')})" if tuned else ""
        return pair(True, f"never tuned with a champion{other}", goal)
    last = whole[0]
    numbers["version"] = version = _ended_with(fleet.store, last)
    if version != champion:
        text = f"last tuned with version {version} on {last.started_at:%Y-%m-%d}, version {champion} is champion now"
        return pair(True, text, goal)
    of_version = takewhile(lambda run: _ended_with(fleet.store, run) == champion, whole)
    numbers["trials"] = trials = sum(_trials(fleet.store, run) for run in of_version)
    so_far = f"{trials} of {goal} programs with version {champion}"
    if last.code in _USED_UP:
        return pair(False, f"{so_far}, and its last run ended: {last.reason}")
    if trials >= goal:
        return pair(False, so_far)
    ended = "" if last.code is ReasonCode.DONE else f", its last run ended: {last.reason}"
    return pair(True, f"{so_far}{ended}", goal - trials)


def _measured(store: MeasurementStore, run: Run) -> bool:
    """Whether a run says anything of its pair: one that failed before its first program does not."""
    return run.state is RunState.DONE or _trials(store, run) > 0


def _trials(store: MeasurementStore, run: Run) -> int:
    """Programs of a run and the parts before it; of a run that was killed those that are in the store."""
    return int(run.result["trials"]) if "trials" in run.result else len(_programs(store, run.run_id))


def _ended_with(store: MeasurementStore, run: Run) -> str | None:
    """The version of its last round; None if it had none."""
    if (version := run.result.get("model_version")) not in (None, "none"):
        return str(version)
    rounds = store.tuning_results(run_id=run.run_id)
    return rounds[-1].model_version if rounds else None


def _programs(store: MeasurementStore, run_id: str) -> set[str]:
    return set(store.measurements(run_id=run_id)["program_id"])
