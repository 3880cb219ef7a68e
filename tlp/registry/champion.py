"""The version that a training starts from."""

from __future__ import annotations

from tlp.core.registry import ModelRegistry
from tlp.model.checkpoint import Checkpoint
from tlp.registry.versions import find_champion as find_champion


def load_champion(registry: ModelRegistry, key: str) -> tuple[str, Checkpoint] | None:
    """Version and checkpoint of `find_champion`."""
    champion = find_champion(registry, key)
    return None if champion is None else (str(champion.version), champion.loaded)
