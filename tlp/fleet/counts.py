"""How many programs may be asked for (quotas, samples, trials), and how to ask for more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from storage import Device, Network
from tlp.core.errors import InvalidInputError
from tlp.core.requests import MAX_PROGRAMS

DATASET: Final = "dataset"
"""Endpoint kind of a platform of an imported data set; `tlp.measure.endpoint` has all kinds."""


def validate_count(what: str, value: int, *, next_command: str) -> int:
    """Return `value` if it is from 1 to `MAX_PROGRAMS`. Raises InvalidInputError, which names `what` is counted."""
    if 1 <= value <= MAX_PROGRAMS:
        return value
    raise InvalidInputError(f"{what} is {value}, it must be from 1 to {MAX_PROGRAMS}", next_command=next_command)


def has_hardware(device: Device) -> bool:
    """Whether programs can be measured on a device; a platform of an imported data set has samples only."""
    return device.endpoint.get("kind") != DATASET


def more_samples(device: Device, samples: int) -> str:
    """The command that gets a device more samples: a platform of a data set has no hardware to measure on."""
    if not has_hardware(device):
        return "tlp import --help"
    return f"tlp measure {device.name} --samples {samples}"


def more_held_out(device: Device, networks: Iterable[Network]) -> str:
    """The command that gets a device samples to be judged on: of the first held-out network that can be compiled.

    If there is none, one that is held out by default is to be added. Where no network is held out, any samples do.
    """
    held_out = [network for network in networks if network.holdout]
    if not has_hardware(device) or not held_out:
        return more_samples(device, 200)
    for network in held_out:
        if network.tasks and not network.source.startswith("dataset:"):
            return f"tlp measure {device.name} --samples 200 --network {network.name}"
    return "tlp network add bert_tiny --builtin bert_tiny"
