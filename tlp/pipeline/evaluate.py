"""`tlp evaluate`: a registered version on the held-out networks, beside baselines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage import Device
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.registry import ModelRegistry, ResolvedModel
from tlp.core.settings import Settings
from tlp.fleet.counts import more_held_out
from tlp.language.encoders import language_of
from tlp.model.checkpoint import Checkpoint
from tlp.model.nearest import nearest_head
from tlp.registry import model_name
from tlp.registry.versions import find_champion
from tlp.training.data.holdout import choose_holdout
from tlp.training.judge import plots
from tlp.training.judge.compare import Baselines, snapshot_of, train_baselines
from tlp.training.judge.evaluate import EvaluationReport, PredictorResult, Scorer, evaluate
from tlp.training.judge.intervals import with_intervals
from tlp.training.judge.table import BASELINES
from tlp.training.kinds import scorer_of
from tlp.training.plan import keys_of

PREDICTOR = "mtl-tlp"


def evaluate_version(
    fleet: Fleet,
    *,
    ref: str = "champion",
    baselines: Sequence[str] = ("random",),
    family: str | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Top-k of a version per device, with 95% bootstrap intervals over the held-out tasks.

    A device is scored by the models of its language (`tlp.training.plan.keys_of`).

    `felix` is the promoted version of Felix's cost model; the other baselines are trained on each device's samples at
    the version's watermark (`tlp.training.judge.compare`). A program that TVM cannot replay has no features for `xgb`
    and `mlp`: on a device where one of them is compared, no predictor is asked about it (`left_out` counts them).

    Args:
        ref: `champion`, another alias, or a version number.
        baselines: out of `BASELINES`; random choice is always there.
        family: ISA family; None: every one that has samples and such a version that can be read.
        plot: where to draw the top-k curves, a PNG; None: nothing is drawn.

    Returns:
        `devices` (device → predictor → `top1`, `top5`, `networks` and what `tlp.training.judge.intervals` adds),
        `watermark`, `models` (name → version as text), `skipped` (family → why it is not here), `notes`, `left_out`
        (device → programs), `trained` (device → baseline → programs and seconds) and `plot`.

    Raises:
        InvalidInputError: an unknown baseline, a plot that is no PNG or cannot be written, or no measured program of
            a held-out network.
        NotFoundError: no device has samples; no family has such a version.
        ModelFormatError: no family has one that this release can read.
        RegistryError: the registry is at fault.
    """
    _require_known(baselines)
    if plot is not None:
        _require_writable(plot)
    counts = fleet.store.device_counts()
    measured = [device for device in fleet.store.list_devices() if counts[device.name].samples_ok]
    key_of = keys_of(fleet.store, measured)
    keys = sorted({key_of[device.name] for device in measured if family in (None, device.family)})
    if not keys:
        of = "" if family is None else f" of family {family!r}"
        raise NotFoundError(f"no device{of} has samples to evaluate on", next_command="tlp device list")

    fleet.registry.reconcile()
    resolved, skipped = _resolve(fleet.registry, keys, ref)
    mark = fleet.store.watermark()
    report: dict[str, Any] = {
        "devices": {},
        "watermark": mark,
        "models": {version.model: str(version.version) for version, _ in resolved.values()},
        "skipped": skipped,
        "notes": [],
        "left_out": {},
        "trained": {},
        "plot": None,
    }
    results: dict[str, dict[str, PredictorResult]] = {}
    for name, (version, checkpoint) in resolved.items():
        devices = [device for device in measured if key_of[device.name] == name]
        beside: dict[str, Scorer] = {}
        for kind in (name for name in baselines if BASELINES[name].is_promoted):
            beside |= _promoted(fleet, kind, name, report)
        results |= _evaluate_model(fleet, version, checkpoint, devices, baselines, report, beside)
    if not results:
        raise InvalidInputError(
            "no held-out network has measured programs, at least two per task are needed",
            next_command=more_held_out(measured[0], fleet.store.list_networks()),
        )
    report["devices"] = {
        device: with_intervals(predictors, reference=PREDICTOR, seed=fleet.settings.seed)
        for device, predictors in results.items()
    }
    if plot is not None:
        drawn = plots.top_k_curves(EvaluationReport(results, mark), plot, seed=fleet.settings.seed)
        report["plot"] = str(drawn.absolute())
    return report


def _require_known(baselines: Sequence[str]) -> None:
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise InvalidInputError(
            f"baseline {unknown[0]!r} is not in this release, there is {', '.join(BASELINES)}",
            next_command="tlp evaluate --baseline random",
        )


def default_plot(settings: Settings, ref: str) -> Path:
    """Where `tlp evaluate` draws if not told: one file per version asked for, drawn anew each time."""
    return settings.artifacts_dir / "evaluate" / f"top_k-{re.sub(r'[^A-Za-z0-9_-]', '_', ref)}.png"


def _require_writable(plot: Path) -> None:
    """Raise InvalidInputError unless a PNG can be written there: evaluating may take hours, so it is asked first."""
    again = "tlp evaluate --plot top_k.png"
    if plot.suffix.lower() != ".png":
        raise InvalidInputError(f"the plot {plot} must end in .png", next_command=again)
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
        is_new = not plot.exists()
        plot.open("ab").close()
        if is_new:
            plot.unlink()
    except OSError as exc:
        raise InvalidInputError(f"the plot {plot} cannot be written: {exc.strerror}", next_command=again) from exc


def _resolve(
    registry: ModelRegistry, families: Sequence[str], ref: str
) -> tuple[dict[str, tuple[ResolvedModel, Checkpoint]], dict[str, str]]:
    """The version of each family and why the others have none that can be used; raises that if no family has one."""
    resolved: dict[str, tuple[ResolvedModel, Checkpoint]] = {}
    missing: dict[str, NotFoundError | ModelFormatError] = {}
    for name in families:
        try:
            version = registry.resolve(name, ref=ref)
            resolved[name] = version, Checkpoint.load(version.checkpoint_dir)
        except (NotFoundError, ModelFormatError) as exc:
            missing[name] = exc
    if not resolved:
        # A version that cannot be read says more than one that is not there.
        raise next((exc for exc in missing.values() if isinstance(exc, ModelFormatError)), missing[families[0]])
    return resolved, {name: exc.message for name, exc in missing.items()}


def _promoted(fleet: Fleet, kind: str, key: str, report: dict[str, Any]) -> dict[str, Scorer]:
    """The champion of another kind of model beside MTL-TLP's under a key; none, with a note, if none can be used."""
    try:
        champion = find_champion(fleet.registry, f"{kind}-{key}")
    except ModelFormatError as exc:
        report["notes"].append(f"{kind} left out: {exc.message}")
        return {}
    if champion is None:
        report["notes"].append(f"{kind} left out, no version is promoted: tlp train --model {kind}")
        return {}
    report["models"][model_name(f"{kind}-{key}")] = str(champion.version)
    return {kind: scorer_of(fleet, champion.loaded)}


def _evaluate_model(
    fleet: Fleet,
    resolved: ResolvedModel,
    checkpoint: Checkpoint,
    devices: Sequence[Device],
    baselines: Sequence[str],
    report: dict[str, Any],
    beside: Mapping[str, Scorer],
) -> dict[str, Any]:
    """Results per device and predictor; what happened on the way goes into `report`."""
    language = language_of(checkpoint.encoder_version)
    version = scorer_of(fleet, checkpoint)
    holdout = choose_holdout(fleet.store, language=language)
    mark = report["watermark"]
    names = [name for name, entry in BASELINES.items() if entry.is_trained and name in baselines]
    trained_at, note = snapshot_of(fleet.store, checkpoint.manifest, mark) if names else (mark, None)
    report["notes"] += [f"{resolved.model}: {note}"] if note else []
    if seen := sorted(set(holdout.networks) - set(checkpoint.manifest.holdout)):
        report["notes"].append(
            f"{resolved.model}: {', '.join(seen)} was not held out when version {resolved.version} was trained"
        )
    results: dict[str, Any] = {}
    # Baselines are trained only where there is something to rank.
    for name in evaluate(
        fleet.store, [d.name for d in devices], {}, watermark=mark, holdout=holdout, language=language
    ).devices:
        device = fleet.store.get_device(name)
        if name not in checkpoint.heads:
            like = nearest_head(checkpoint, name, device.target, device.family)
            report["notes"].append(f"{name}: version {resolved.version} has no head for it, {like}'s is used")
        made = Baselines()
        if names:
            made = train_baselines(
                fleet, device, names, checkpoint, watermark=trained_at, evaluated_at=mark, holdout=holdout
            )
        scorers = {PREDICTOR: version, **beside} | made.scorers
        ranked = evaluate(
            fleet.store, [name], scorers, watermark=mark, holdout=holdout, exclude=made.exclude, language=language
        ).devices
        if not ranked:
            made.leave_out_features(f"{name}: TVM can replay no two programs of any held-out task")
            scorers = {PREDICTOR: version, **beside} | made.scorers
            ranked = evaluate(fleet.store, [name], scorers, watermark=mark, holdout=holdout, language=language).devices
        results |= ranked
        report["notes"] += made.notes
        report["left_out"] |= {name: len(made.exclude)} if made.exclude else {}
        report["trained"] |= {name: made.facts} if made.facts else {}
    return results
