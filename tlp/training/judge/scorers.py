"""The scorer of a model, whatever its kind."""

from __future__ import annotations

from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.felix.checkpoint import FelixCheckpoint
from tlp.felix.scorer import FelixScorer
from tlp.model.checkpoint import Checkpoint, Model
from tlp.training.judge.evaluate import CheckpointScorer, Scorer


def scorer_of(fleet: Fleet, model: Model) -> Scorer:
    """Ranks programs by a loaded model, with the settings' threads and torch device.

    Args:
        model: of any of `tlp.model.kinds.KINDS`.
        store: holds the workloads of the programs that will be ranked.
        settings: where features are kept.

    Raises:
        InvalidInputError: no such kind of model.
    """
    if isinstance(model, Checkpoint):
        return CheckpointScorer(model, threads=fleet.settings.torch_threads, torch_device=fleet.settings.torch_device)
    if isinstance(model, FelixCheckpoint):
        return FelixScorer(model, fleet.store, fleet.settings.cache_dir / "per-store")
    raise InvalidInputError(f"a {type(model).__name__} cannot be asked for scores")
