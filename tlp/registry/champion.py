"""The version that a training starts from."""

from __future__ import annotations

import logging
from typing import Any

from tlp.core.errors import NotFoundError
from tlp.core.registry import ModelRegistry, Usable
from tlp.model.checkpoint import Checkpoint, Model
from tlp.model.kinds import load_model

log = logging.getLogger(__name__)


def load_champion(registry: ModelRegistry, key: str) -> tuple[str, Checkpoint] | None:
    """The version to start from and to compare with under a `model_key`; None if there is none.

    The champion; if it was deleted, its alias points nowhere or its files are gone or damaged, the last good version,
    with a warning in the log.

    Raises:
        ModelFormatError: no version can be read by this release.
        RegistryError: the registry is at fault.
    """
    found = find_champion(registry, key)
    return None if found is None else (str(found.version), found.loaded)


def find_champion(registry: ModelRegistry, key: str) -> Usable | None:
    """`load_champion` with the reason if it is not the champion; `loaded` is a model of the key's kind."""

    def load(resolved: Any) -> Model:
        return load_model(resolved.checkpoint_dir)

    try:
        found = registry.usable(key, None, load)
    except NotFoundError:
        return None
    if found.fallback:
        log.warning("%s", found.fallback)
    return found
