"""`tlp evaluate`: a registered version on the held-out networks, beside baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage import MeasurementStore
from tlp.errors import InvalidInputError, NotFoundError
from tlp.settings import Settings

BASELINES = ("random",)
PREDICTOR = "mtl-tlp"


def evaluate_version(
    store: MeasurementStore,
    settings: Settings,
    *,
    ref: str = "champion",
    baselines: Sequence[str] = BASELINES,
    family: str | None = None,
) -> dict[str, Any]:
    """Top-k of a version per device.

    Args:
        store: the store.
        settings: where the registry is, torch's threads and device.
        ref: `champion`, another alias, or a version number.
        baselines: out of `BASELINES`; random choice is always there.
        family: ISA family; None: every one that has samples.

    Returns:
        `devices` (device → predictor → `top1`, `top5`, `networks`), `watermark`, and `models` (name → version as text).

    Raises:
        InvalidInputError: an unknown baseline, or no measured program of a held-out network.
        NotFoundError: no device has samples; no such version; an alias that points nowhere.
        ModelFormatError: the version cannot be read by this release.
        RegistryError: the registry is at fault.
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise InvalidInputError(
            f"baseline {unknown[0]!r} is not in this release, there is {', '.join(BASELINES)}",
            next_command="tlp evaluate --baseline random",
        )
    counts = store.device_counts()
    measured = [device for device in store.list_devices() if counts[device.name].samples_ok]
    families = sorted({device.family for device in measured if family in (None, device.family)})
    if not families:
        of = f" of family {family}" if family else ""
        raise NotFoundError(f"no device{of} has samples to evaluate on", next_command="tlp device list")

    from tlp.model.checkpoint import Checkpoint
    from tlp.registry import Registry
    from tlp.training.evaluate import CheckpointScorer, evaluate

    registry = Registry(settings, store)
    registry.reconcile()
    report: dict[str, Any] = {"devices": {}, "watermark": store.watermark(), "models": {}}
    for name in families:
        resolved = registry.resolve(name, ref=ref)
        checkpoint = Checkpoint.load(resolved.checkpoint_dir)
        scorer = CheckpointScorer(checkpoint, threads=settings.torch_threads, torch_device=settings.torch_device)
        devices = [device.name for device in measured if device.family == name]
        result = evaluate(store, devices, {PREDICTOR: scorer}, watermark=report["watermark"])
        report["devices"] |= result.to_json()["devices"]
        report["models"][resolved.model] = str(resolved.version)
    if not report["devices"]:
        raise InvalidInputError(
            "no held-out network has measured programs, at least two per task are needed",
            next_command=f"tlp measure {measured[0].name} --samples 200",
        )
    return report
