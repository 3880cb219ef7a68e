"""Whether a registered version gives the scores that it was judged by: asked before an alias moves to it.

What MLflow stores and gives back may be something else than what was judged: a file cut off, swapped or of another
version. So the version is resolved and loaded in a process of its own, as a tuning run will do it, and scores programs
that were scored when it was judged. A registry that other processes cannot reach is asked in this one.

    python -m tlp.training.reproduce < request.json
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import polars as pl
from pydantic import TypeAdapter

from storage import Device, open_store
from tlp.core.errors import NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.language.constants import bind_all
from tlp.model.kinds import kind_of, load_model
from tlp.registry import Registry, model_name
from tlp.registry.kept import ScoredPrograms
from tlp.training.judge.evaluate import Scorer
from tlp.training.kinds import scorer_of, trained_kind

WORKLOADS: Final = 2
PROGRAMS: Final = 16
TOLERANCE: Final = 1e-3
"""Of the spread of the scores: batches of other sizes are summed in another order."""
ARGV: Final = ("-m", "tlp.training.reproduce")
_TIMEOUT_S: Final = 600.0


class NotReproducedError(RegistryError):
    """The registered version is not the one that was judged."""


def score_samples(
    fleet: Fleet, scorer: Scorer, devices: Sequence[Device], workload_ids: Sequence[str], watermark: int, language: str
) -> list[ScoredPrograms]:
    """Up to `PROGRAMS` programs of the first `WORKLOADS` measured workloads of each device, with finite scores."""
    known = [s for s in fleet.store.get_sketches(workload_ids=sorted(workload_ids)) if s.language == language]
    samples = []
    for device in devices:
        sketches = bind_all(known, device)
        frame = fleet.store.programs_with_latency(
            devices=[device.name], watermark=watermark, workload_ids=sorted(workload_ids)
        ).filter(pl.col("sketch_id").is_in(list(sketches)))
        for group in frame.partition_by("workload_id", maintain_order=True)[:WORKLOADS]:
            rows = group.head(PROGRAMS).select("sketch_id", "decisions").rows()
            scores = np.asarray(scorer.score(device, [(sketches[s], d) for s, d in rows]), dtype=np.float64)
            kept = [(s, tuple(d), float(v)) for (s, d), v in zip(rows, scores, strict=True) if np.isfinite(v)]
            if kept:
                samples.append(ScoredPrograms(device.name, *zip(*kept, strict=True)))
    return samples


def require_reproduced(fleet: Fleet, key: str, version: int, samples: Sequence[ScoredPrograms]) -> None:
    """Load the registered version and compare its scores with those it was judged by.

    Raises:
        NotReproducedError: they differ, or the version cannot be loaded.
        RegistryUnavailableError: the registry does not answer.
        RegistryError: the process that was to load it did not get through.
    """
    name = f"version {version} of {model_name(key)}"
    answer = (_asked_in_a_process if fleet.registry.shared else _answer)(fleet, key, version, samples)
    if "unavailable" in answer:
        raise RegistryUnavailableError(answer["unavailable"], next_command="tlp doctor")
    if "unusable" in answer:
        raise NotReproducedError(f"{name} as registered cannot be used: {answer['unusable']}", next_command="tlp train")
    for sample, again in zip(samples, answer["scores"], strict=True):
        judged = np.array(sample.scores)
        off = np.abs(np.array(again) - judged)
        worst = int(off.argmax())
        if not off[worst] <= TOLERANCE * max(float(np.ptp(judged)), 1e-3):
            raise NotReproducedError(
                f"{name} was judged by a score of {judged[worst]:.6g} for a program on {sample.device}; "
                f"as registered it gives {again[worst]:.6g}",
                next_command="tlp train",
            )


def _answer(fleet: Fleet, key: str, version: int, samples: Sequence[ScoredPrograms]) -> dict[str, Any]:
    """`scores` of the samples' programs by the registered version, or what is wrong: `unavailable`, `unusable`."""
    try:
        scorer = scorer_of(fleet, load_model(fleet.registry.resolve(key, ref=version).checkpoint_dir))
    except RegistryUnavailableError as exc:
        return {"unavailable": exc.message}
    except (RegistryError, NotFoundError) as exc:
        return {"unusable": exc.message}
    known = fleet.store.get_sketches(sorted({sketch for sample in samples for sketch in sample.sketch_ids}))
    devices = {device.name: device for device in fleet.store.list_devices()}
    scores = []
    for sample in samples:
        sketches = bind_all(known, devices[sample.device])
        programs = [(sketches[s], d) for s, d in zip(sample.sketch_ids, sample.decisions, strict=True)]
        scores.append(np.asarray(scorer.score(devices[sample.device], programs)).tolist())
    return {"scores": scores}


def _asked_in_a_process(fleet: Fleet, key: str, version: int, samples: Sequence[ScoredPrograms]) -> dict[str, Any]:
    request = {
        "settings": fleet.settings.model_dump(mode="json"),
        "kind": trained_kind(kind_of(model_name(key)).name).scorer.__module__,  # its import makes the kind known
        "key": key,
        "version": version,
        "samples": [asdict(sample) for sample in samples],
    }
    try:
        done = subprocess.run(
            [sys.executable, *ARGV],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, ValueError, IndexError) as exc:
        said = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()[-1:]
        what = f"version {version} of {model_name(key)} could not be loaded in a process of its own: {' '.join(said)}"
        raise RegistryError(what, next_command="tlp doctor") from exc


def _main() -> None:
    request = json.load(sys.stdin)
    settings = Settings.model_validate(request["settings"])
    importlib.import_module(request["kind"])
    store = open_store(settings.store_url, settings.store_lock_timeout_s)
    samples = TypeAdapter(list[ScoredPrograms]).validate_python(request["samples"])
    fleet = Fleet(settings, store, Registry(settings, store))
    sys.stdout.write(json.dumps(_answer(fleet, request["key"], request["version"], samples)) + "\n")


if __name__ == "__main__":
    _main()
