"""Whether a device makes a training due, in which schedule language, and which devices train together.

A model is of one language. MetaSchedule's is what tuning asks, so a device that has samples of both is trained in
MetaSchedule and its Ansor samples are left out; one with Ansor samples only is trained in Ansor, as a registered model
of its own (`model_key`) that tuning never looks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage import Device, MeasurementStore
from tlp.model.checkpoint import Manifest
from tlp.model.encoders import LANGUAGES, METASCHEDULE
from tlp.model.nearest import similarity
from tlp.runs import OUT_OF_WORK
from tlp.settings import Settings
from tlp.training.dataset import choose_language

MAX_AUXILIARIES = 3  # the paper: two or three tasks help, a fourth auxiliary costs accuracy


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


def model_key(family: str, language: str) -> str:
    """What the registry calls the models of an ISA family in a language: `x86_64`, or `ansor-x86_64` for Ansor's."""
    return family if language == METASCHEDULE else f"{language}-{family}"


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
    store: MeasurementStore, settings: Settings, device: str, champion: Manifest | None, *, force: bool = False
) -> Decision:
    """Whether `device` makes a training due, in its language (`training_language`).

    A device without a head needs its `min_samples`; one with a head needs `retrain_min_new_samples` (or its
    `min_samples`, if that is less) since the champion's watermark. `force` needs one sample.

    Raises:
        NotFoundError: no such device.
    """
    row = store.get_device(device)
    counts = store.sample_languages()[device]
    language = choose_language({device: counts}, [device])
    found = _decide(store, settings, row, champion, language, counts.get(language, 0), force)
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
    store: MeasurementStore,
    settings: Settings,
    row: Device,
    champion: Manifest | None,
    language: str,
    have: int,
    force: bool,
) -> Decision:
    device = row.name
    numbers = {"samples": have, "min_samples": row.min_samples}
    if row.state in OUT_OF_WORK:
        return Decision(False, f"{device} is {row.state} and gets no new work", numbers)
    if have == 0:
        return Decision(False, f"{device} has no samples yet", numbers)
    if force:
        return Decision(True, f"asked for, with {have} samples of {device}", numbers)
    if champion is None or device not in champion.heads:
        if have >= row.min_samples:
            return Decision(True, f"{device} is a new task: {have} samples, {row.min_samples} needed", numbers)
        lacking = row.min_samples - have
        return Decision(
            False,
            f"{device} has {have} of {row.min_samples} samples, {lacking} lacking",
            numbers | {"lacking": lacking},
        )
    needed = min(settings.retrain_min_new_samples, row.min_samples)
    new = new_samples(store, device, champion.watermark, language)
    numbers |= {"new_samples": new, "needed": needed, "watermark": champion.watermark}
    since = f"{new} new samples of {device} since watermark {champion.watermark}, {needed} needed"
    return Decision(new >= needed, since, numbers)


def choose_devices(
    store: MeasurementStore, device: Device, champion: Manifest | None, language: str = METASCHEDULE
) -> list[str]:
    """Devices to train together: the champion's heads that the store has, the device, and auxiliaries of its family.

    Auxiliaries are the most similar targets with their quota of samples in that language full, at most
    `MAX_AUXILIARIES`; a champion's heads all stay. Sorted by name.
    """
    counts = {name: of.get(language, 0) for name, of in store.sample_languages().items()}
    family = [d for d in store.list_devices() if d.family == device.family and counts[d.name] > 0]
    names = {d.name for d in family}
    chosen = {device.name} | (names & set(champion.heads) if champion else set())
    free = MAX_AUXILIARIES - (len(chosen) - 1)
    ready = [d for d in family if d.name not in chosen and counts[d.name] >= d.min_samples]
    ready.sort(key=lambda d: (similarity(device.target, d.target), counts[d.name], d.name), reverse=True)
    return sorted(chosen | {d.name for d in ready[: max(free, 0)]})
