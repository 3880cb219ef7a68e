"""From a kept model to the champion: judge → register → alias → history, each step such that it may be done again.

A process that dies between two steps leaves the kept folder; the next start calls `submit_kept`. The registry is asked
what became of the submission before anything is registered, and the history before anything is promoted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

from storage import DeviceState, MeasurementStore, ReasonCode
from tlp.core.errors import (
    BusyError,
    InvalidInputError,
    ModelFormatError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
)
from tlp.core.faults import reached
from tlp.core.fleet import Fleet
from tlp.core.next_steps import next_command
from tlp.core.registry import ModelRegistry, Submission, UsableVersion, VersionFacts
from tlp.core.settings import Settings
from tlp.fleet import locks, states
from tlp.fleet.counts import more_held_out
from tlp.model.checkpoint import KIND, MANIFEST, Manifest, Model
from tlp.model.kinds import load_model
from tlp.registry import kept as keeping
from tlp.registry import model_name
from tlp.registry.champion import find_champion
from tlp.registry.kept import Judged, KeptCandidate
from tlp.training.data.dataset import choose_language
from tlp.training.data.holdout import Holdout
from tlp.training.judge import gate_page, plots
from tlp.training.judge.evaluate import EvaluationReport, evaluate
from tlp.training.judge.gate import CHAMPION, GateVerdict, judge
from tlp.training.judge.screen import ScreenedScorer
from tlp.training.kinds import scorer_of

log = logging.getLogger(__name__)
T = TypeVar("T")
_LONGEST_PAUSE_S = 15.0


@dataclass(frozen=True)
class Submitted:
    """What became of a kept model.

    Attributes:
        version: the registry's number.
        promoted: `champion` was moved to it, now or by the process that was killed.
        reason: the gate's reasons, or what kept a passed one from being promoted.
        gate: the verdict.
        report: the evaluation; None if the process that was killed made it.
        kept: what it was.
        samples: OK samples per device in its snapshot.
        origin: `strategy, parent, watermark`.
    """

    version: int
    promoted: bool
    reason: str
    gate: GateVerdict
    report: EvaluationReport | None
    kept: KeptCandidate
    samples: Mapping[str, int]
    origin: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Registered model, e.g. `mtl-tlp-x86_64`."""
        return model_name(self.kept.facts.key)


def patiently(settings: Settings, call: Callable[[], T]) -> T:
    """Call something that may be repeated until MLflow answers, for `registry_patience_s` at most."""
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailableError),
        stop=tenacity.stop_after_delay(settings.registry_patience_s),
        wait=tenacity.wait_exponential_jitter(multiplier=0.5, max=_LONGEST_PAUSE_S),
        before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("unreachable: tenacity returns or raises")


def submit_kept(fleet: Fleet, key: str | None = None) -> list[Submitted]:
    """Go on with every model that is kept (for one key), oldest first; called at a start.

    Families that are being trained are left to the process that does. A registry that fails leaves its model kept,
    with a warning in the log.
    """
    done = []
    for candidate in keeping.find(fleet.settings, key):
        try:
            _check_belongs(fleet.store, candidate)
            with locks.train_lock(fleet.settings, candidate.facts.key):
                if candidate.folder.is_dir():
                    done.append(submit(fleet, candidate))
        except BusyError:
            continue
        except ModelFormatError as exc:
            candidate.set_aside(exc.message)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:  # files of an older release, or edited
            candidate.set_aside(f"the kept model {candidate.folder} cannot be used ({type(exc).__name__}: {exc})")
        except RegistryError as exc:
            log.warning("%s", exc.message)
    return done


def _check_belongs(store: MeasurementStore, candidate: KeptCandidate) -> None:
    """Raises ModelFormatError: the store has not what it must be judged on, so it was trained on another one."""
    try:
        store.get_device(candidate.facts.device)
        store.get_workloads(sorted({workload for tasks in candidate.facts.holdout.values() for workload in tasks}))
    except NotFoundError as exc:
        raise ModelFormatError(
            f"the kept model {candidate.folder} does not belong to this store: {exc.message}", next_command="tlp train"
        ) from exc


def submit(fleet: Fleet, candidate: KeptCandidate, model: Model | None = None) -> Submitted:
    """Judge, register, promote if it passed, record; then the kept folder goes. The caller holds the train lock.

    Args:
        model: the checkpoint if it is in memory.

    Raises:
        RegistryUnavailableError, RegistryError: the registry is at fault; the model stays kept, the message says so.
    """
    try:
        return _submit(fleet, candidate, model)
    except RegistryError as exc:
        raise type(exc)(
            f"{exc.message}; the trained model is kept as {candidate.folder} and goes on at the next start",
            next_command=next_command(exc),
        ) from exc


def _submit(fleet: Fleet, candidate: KeptCandidate, model: Model | None) -> Submitted:
    facts, report = candidate.facts, None
    version = patiently(fleet.settings, lambda: fleet.registry.find_submission(facts.key, candidate.submission))
    judged = candidate.judged()
    if judged is None or version is None:
        alias = patiently(fleet.settings, lambda: fleet.registry.champion_version(facts.key))
        champion = patiently(fleet.settings, lambda: _champion(fleet.registry, facts.key))
        if judged is None or (judged.alias, judged.champion) != (alias, champion.version if champion else None):
            judged, report = _judge(fleet, candidate, model, champion, alias)
            candidate.keep_verdict(judged)
    reached("judged")
    found = judged  # for the closures: it is not None any more
    version = patiently(
        fleet.settings, lambda: _register(fleet.registry, candidate, found)
    )  # finishes what a kill left open
    gate, manifest = GateVerdict.from_json(judged.gate), _manifest(candidate)
    promoted, reason = False, "; ".join(gate.reasons)
    if gate.passed:
        promoted, reason = _promote(fleet.settings, fleet.registry, candidate, judged, version, reason)
    if promoted and manifest.kind == KIND:  # what tuning asks by itself
        heads = _speakers(fleet.store, manifest.heads, facts.language)
        mark_serving(fleet.store, heads, f"version {version} of {model_name(facts.key)} was promoted")
    reached("served")
    candidate.drop()
    origin = {"strategy": manifest.strategy, "parent": manifest.parent, "watermark": manifest.watermark}
    return Submitted(version, promoted, reason, gate, report, candidate, manifest.samples, origin)


def _champion(registry: ModelRegistry, key: str) -> UsableVersion[Any] | None:
    """What to compare with; None if there is nothing that can be read, which a new model does not have to beat."""
    try:
        return find_champion(registry, key)
    except ModelFormatError as exc:
        log.warning("no champion to compare with: %s", exc.message)
        return None


def _judge(
    fleet: Fleet, candidate: KeptCandidate, model: Model | None, champion: UsableVersion[Any] | None, alias: int | None
) -> tuple[Judged, EvaluationReport]:
    facts = candidate.facts
    version = None if champion is None else champion.version
    try:
        loaded = model or load_model(candidate.checkpoint_dir)
    except ModelFormatError as exc:
        refused = GateVerdict(False, (exc.message,), ())
        return Judged(version, alias, refused.to_json(), {}, {}), EvaluationReport({}, 0)
    called = loaded.manifest.kind
    scorers = {
        name: ScreenedScorer(scorer_of(fleet, checkpoint))
        for name, checkpoint in ((called, loaded), (CHAMPION, champion.loaded if champion else None))
        if checkpoint is not None
    }
    heads = set(loaded.heads) | set(champion.loaded.heads if champion else ())
    names = _speakers(fleet.store, heads, facts.language)
    workloads = frozenset(workload for tasks in facts.holdout.values() for workload in tasks)
    report = evaluate(
        fleet.store,
        names,
        scorers,
        watermark=loaded.manifest.watermark,
        holdout=Holdout(facts.held_networks, workloads, facts.holdout),
        language=facts.language,
    )
    verdict = judge(
        report,
        fleet.settings,
        trained=[facts.device],
        candidate=called,
        champion=CHAMPION if champion else None,
        others=[name for name in names if name != facts.device],
        defects=scorers[called].defects(),
        remedies={facts.device: more_held_out(fleet.store.get_device(facts.device), fleet.store.list_networks())},
    )
    plots.draw_all(report, loaded.manifest.curves, candidate.figures_dir)
    metrics = _metrics(loaded.manifest, report, verdict, facts.device)
    return Judged(version, alias, verdict.to_json(), report.to_json(), metrics), report


def _metrics(manifest: Manifest, report: EvaluationReport, verdict: GateVerdict, device: str) -> dict[str, float]:
    """Numbers, so that MLflow sorts and compares versions by them."""
    metrics = dict(manifest.metrics) | {
        "watermark": float(manifest.watermark),
        "samples": float(sum(manifest.samples.values())),
        "gate_passed": float(verdict.passed),
    }
    metrics |= {f"samples.{name}": float(count) for name, count in manifest.samples.items()}
    for name, predictors in report.devices.items():
        metrics |= {f"top{k}.{name}": predictors[manifest.kind].top(k) for k in (1, 5)}
    metrics |= {f"gain.top{c.k}.{c.device}": c.difference for c in verdict.comparisons}
    if device in report.devices:
        metrics |= {f"top{k}": report.devices[device][manifest.kind].top(k) for k in (1, 5)}
    return metrics


def _register(registry: ModelRegistry, candidate: KeptCandidate, judged: Judged) -> int:
    facts, manifest = candidate.facts, _manifest(candidate)
    gate = GateVerdict.from_json(judged.gate)
    described = VersionFacts(
        samples=manifest.samples,
        strategy=manifest.strategy,
        parent_version=manifest.parent,
        gate_passed=gate.passed,
        gate_reasons=gate.reasons,
        judged_against=judged.champion,
    )
    page = {
        "model": model_name(facts.key),
        "gate": judged.gate,
        "warnings": facts.warnings,
        "samples": manifest.samples,
        "strategy": manifest.strategy,
        "parent": manifest.parent,
        "watermark": manifest.watermark,
    }
    params = {
        "device": facts.device,
        "devices": list(manifest.heads),
        "seeds": list(manifest.seeds),
        "strategy": manifest.strategy,
        "watermark": manifest.watermark,
        "encoder_version": manifest.encoder_version,
        "parent_version": manifest.parent or "none",
    }
    return registry.register(
        Submission(
            candidate.checkpoint_dir,
            facts.key,
            facts.device,
            described.to_tags(),
            candidate.submission,
            run_name=f"retrain-{facts.device}",
            at=facts.at,
            params=params,
            metrics=judged.metrics,
            curves={name: list(enumerate(values)) for name, values in manifest.curves.items()},
            table=gate_page.table(judged.gate),
            page=gate_page.page(page),
            report=dict(judged.report) | {"gate": dict(judged.gate)},
            figures=sorted(candidate.figures_dir.glob("*.png")),
        )
    )


def _manifest(candidate: KeptCandidate) -> Manifest:
    """Without a look at the weights, which may be what is wrong. Raises ModelFormatError."""
    path = candidate.checkpoint_dir / MANIFEST
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        return Manifest.from_json(value)
    except (OSError, ValueError) as exc:
        raise ModelFormatError(f"{path} cannot be read: {exc}", next_command="tlp train") from exc


def _promote(
    settings: Settings,
    registry: ModelRegistry,
    candidate: KeptCandidate,
    judged: Judged,
    version: int,
    reasons: str,
) -> tuple[bool, str]:
    facts = candidate.facts
    why = f"{facts.reason}; passed the gate: {reasons}"
    try:
        patiently(
            settings,
            lambda: registry.promote_judged(
                facts.key, version, reason=why, judged_against=judged.alias, parent=facts.parent
            ),
        )
    except InvalidInputError as exc:  # a person decided otherwise while this was trained or kept
        registry.tag(facts.key, version, "not_promoted", exc.message)
        return False, exc.message
    return True, reasons


def _speakers(store: MeasurementStore, heads: Iterable[str], language: str) -> list[str]:
    """Those heads whose devices are in the store and trained in that language."""
    counts = store.sample_languages()
    there = {row.name for row in store.list_devices()} & set(heads)
    return sorted(name for name in there if choose_language(counts, [name]) == language)


def mark_serving(store: MeasurementStore, devices: Iterable[str], reason: str) -> None:
    """Devices with a head in the champion are SERVING, unless they are so already or out of work.

    Said after a promotion, and again by the next retraining: a process killed between the two leaves it unsaid.
    """
    for name in devices:
        if store.get_device(name).state not in (*states.OUT_OF_WORK, DeviceState.SERVING):
            store.set_device_state(name, DeviceState.SERVING, reason, code=ReasonCode.PROMOTED)
