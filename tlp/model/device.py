"""The torch device to compute on."""

from __future__ import annotations

import torch

from tlp.core.errors import InvalidInputError


def open_device(name: str) -> torch.device:
    """The device of that name (`cpu`, `cuda`, `cuda:1`), tried out.

    Raises:
        InvalidInputError: this torch or this machine does not have it.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as exc:  # torch raises any of these, by device
        why = str(exc).strip().splitlines()
        raise InvalidInputError(
            f"torch cannot compute on torch_device {name!r} here: {why[0] if why else type(exc).__name__}",
            next_command="TLP_TORCH_DEVICE=cpu tlp train",
        ) from exc
    return device
