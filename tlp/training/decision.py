"""Whether a device makes a training due, and in which schedule language (which devices: `tlp.training.tasks`).

A model is of one language. MetaSchedule's is what tuning asks, so a device that has samples of both is trained in
MetaSchedule and its Ansor samples are left out; one with Ansor samples only is trained in Ansor, as a registered model
of its own (`model_key`) that tuning never looks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage import Device, MeasurementStore, Run, RunKind, RunState
from tlp.core.fleet import Fleet
from tlp.fleet import quality
from tlp.fleet.states import OUT_OF_WORK
from tlp.language.encoders import LANGUAGES, METASCHEDULE
from tlp.model.checkpoint import KIND, Manifest
from tlp.training.data.dataset import choose_language
from tlp.training.saturation import saturated
from tlp.training.tasks import MAX_AUXILIARIES, choose_devices

__all__ = [
    "MAX_AUXILIARIES",
    "Decision",
    "choose_devices",
    "decide",
    "model_key",
    "new_samples",
    "training_language",
]


_LOOKED_BACK = 16  # trainings of a device, of other models too


@dataclass(frozen=True)
class Decision:
    """Whether a device makes a training due.

    Attributes:
        train: it does.
        reason: one sentence with the numbers.
        numbers: what the sentence was made from.
    """

    train: bool
    reason: str
    numbers: Mapping[str, int]


def model_key(family: str, language: str, kind: str = KIND) -> str:
    """What the registry calls the models of an ISA family in a language: `x86_64`, or `ansor-x86_64` for Ansor's.

    Models of another kind than MTL-TLP have it in front: `felix-x86_64`.
    """
    key = family if language == METASCHEDULE else f"{language}-{family}"
    return key if kind == KIND else f"{kind}-{key}"


def training_language(store: MeasurementStore, device: str) -> str:
    """The language in which a device is trained: MetaSchedule unless all its samples are Ansor's."""
    return choose_language(store.sample_languages(), [device])


def new_samples(store: MeasurementStore, device: str, watermark: int, language: str = METASCHEDULE) -> int:
    """OK samples of a device in a language since a watermark."""
    of_language = [sketch.sketch_id for sketch in store.get_sketches() if sketch.language == language]
    return sum(
        int(frame["sketch_id"].is_in(of_language).sum())
        for frame in store.iter_samples(devices=[device], after=watermark)
    )


def decide(
    fleet: Fleet,
    device: str,
    champion: Manifest | None,
    *,
    force: bool = False,
    champion_version: int | str | None = None,
    kind: str = KIND,
) -> Decision:
    """Whether `device` makes a training due, in its language (`training_language`).

    A device without a head needs its `min_samples`; one with a head needs `retrain_min_new_samples` (or its
    `min_samples`, if that is less) since the champion learned from it, or a fall of its live accuracy
    (`tlp.fleet.quality`). After a candidate that did not pass the gate either waits for so many new samples:
    the same samples would give the same weights. `force` needs one sample.

    Args:
        store: the store.
        settings: `retrain_min_new_samples`, and what the live accuracy is judged by.
        device: name.
        champion: its manifest; None: there is none.
        force: a person asked for it.
        champion_version: the champion's number, for its live accuracy; None: that is not looked at.
        kind: of the model.

    Raises:
        NotFoundError: no such device.
    """
    row = fleet.store.get_device(device)
    counts = fleet.store.sample_languages()[device]
    language = choose_language({device: counts}, [device])
    have = counts.get(language, 0)
    if kind != KIND and language != METASCHEDULE and not force:
        return Decision(
            False, f"{device} has no samples of {METASCHEDULE}, which is what {kind} reads", {"samples": have}
        )
    key = model_key(row.family, language, kind)
    found = _decide(fleet, row, champion, language, have, force, champion_version, key)
    return Decision(found.train, found.reason + _languages_note(counts, language), found.numbers)


def _languages_note(counts: Mapping[str, int], language: str) -> str:
    """What becomes of the samples of other languages; nothing to say if all are MetaSchedule's."""
    others = [f"{counts[name]} {name} samples" for name in LANGUAGES if name != language and counts.get(name)]
    if others:
        return f"; its {' and '.join(others)} are left out: a model is of one language, and tuning asks {language}'s"
    if language != METASCHEDULE and counts:
        return f"; all are {language}'s, so the model is one of its own that tuning does not use"
    return ""


def _decide(
    fleet: Fleet,
    row: Device,
    champion: Manifest | None,
    language: str,
    have: int,
    force: bool,
    champion_version: int | str | None,
    key: str,
) -> Decision:
    device = row.name
    numbers = {"samples": have, "min_samples": row.min_samples}
    if row.state in OUT_OF_WORK:
        return Decision(False, f"{device} is {row.state} and gets no new work", numbers)
    if have == 0:
        return Decision(False, f"{device} has no samples yet", numbers)
    if force:
        found = _decide(fleet, row, champion, language, have, False, champion_version, key)
        by_itself = "" if found.train else f" (by itself it would wait: {found.reason})"
        return Decision(True, f"asked for, with {have} samples of {device}{by_itself}", found.numbers)
    needed = min(fleet.settings.retrain_min_new_samples, row.min_samples)
    if champion is None or device not in champion.heads:
        if have < row.min_samples and (flat := saturated(fleet.store, device)) is not None:
            enough = f"{device} is a new task: {have} of {row.min_samples} samples, more would not help"
            return Decision(True, enough, numbers | {"judged_samples": int(flat["samples"])})
        if have < row.min_samples:
            lacking = row.min_samples - have
            return Decision(
                False,
                f"{device} has {have} of {row.min_samples} samples, {lacking} lacking",
                numbers | {"lacking": lacking},
            )
        found = Decision(True, f"{device} is a new task: {have} samples, {row.min_samples} needed", numbers)
    else:
        mark = champion.learned_until(device)
        new = new_samples(fleet.store, device, mark, language)
        numbers |= {"new_samples": new, "needed": needed, "watermark": mark}
        since = f"{new} new samples of {device} since watermark {mark}, {needed} needed"
        found = Decision(new >= needed, since, numbers)
        fell = None
        if not found.train and champion_version is not None:
            fell = quality.fell(fleet, device, str(champion_version))
        if fell is not None:
            found = Decision(True, f"{fell}; {since}", numbers)
    return _unless_judged(fleet.store, found, device, language, needed, champion_version, key) if found.train else found


def _unless_judged(
    store: MeasurementStore,
    due: Decision,
    device: str,
    language: str,
    needed: int,
    champion_version: int | str | None,
    key: str,
) -> Decision:
    """A training that is due, unless the last one on nearly these samples gave what the gate stopped."""
    last = _last_training(store, device, key)
    if last is None or last.result.get("promoted") or "watermark" not in last.result:
        return due
    parent, mark = last.result.get("parent"), int(last.result["watermark"])
    if champion_version is not None and str(parent) != str(champion_version):
        return due  # the champion is another one now: the training would not be the same
    new = new_samples(store, device, mark, language)
    if new >= needed:
        return due
    why = (
        f"{device}: version {last.result.get('version')} of its samples until watermark {mark} did not pass the gate; "
        f"{new} new samples since, {needed} needed"
    )
    return Decision(False, why, {**due.numbers, "new_samples": new, "needed": needed, "watermark": mark})


def _last_training(store: MeasurementStore, device: str, key: str) -> Run | None:
    """The newest training of a model for a device, if it made a version."""
    for run in store.list_runs(kind=RunKind.TRAIN, state=RunState.DONE, device=device, limit=_LOOKED_BACK):
        if run.params.get("family", key) == key:
            return run if run.result.get("version") is not None else None
    return None
