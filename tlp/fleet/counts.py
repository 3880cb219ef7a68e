"""How many programs may be asked for (quotas, samples, trials), and how to ask for more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from storage import Device, Network
from tlp.core.errors import InvalidInputError
from tlp.core.requests import MAX_PROGRAMS

_HELD_OUT: Final = ("bert_tiny", "resnet_50", "mobilenet_v2")  # by default, the quickest to measure first


def validate_count(what: str, value: int, *, next_command: str) -> int:
    """Return `value` if it is from 1 to `MAX_PROGRAMS`. Raises InvalidInputError, which names `what` is counted."""
    if 1 <= value <= MAX_PROGRAMS:
        return value
    raise InvalidInputError(f"{what} is {value}, it must be from 1 to {MAX_PROGRAMS}", next_command=next_command)


def more_samples(device: Device, samples: int) -> str:
    """The command that gets a device more samples: a platform of a data set has no hardware to measure on."""
    if not device.has_hardware:
        return "tlp import --help"
    return f"tlp measure {device.name} --samples {samples}"


def more_held_out(device: Device, networks: Iterable[Network], *, tasks: int = 1, programs: int = 2) -> str:
    """The command that gets a device samples to be judged on: of the held-out networks that can be compiled.

    If those have fewer than `tasks` tasks, another that is held out by default is to be added. Where no network is held
    out, any samples do for a single task: a tenth of the workloads is.

    Args:
        programs: wanted of each task.
    """
    held_out = [network for network in networks if network.holdout]
    if not device.has_hardware or (not held_out and tasks < 2):
        return more_samples(device, 200)
    able = [network for network in held_out if network.tasks and not network.source.startswith("dataset:")]
    workloads = {task.workload_id for network in able for task in network.tasks}
    lacking = [name for name in _HELD_OUT if all(network.name != name for network in able)]
    if len(workloads) < tasks and lacking:
        return f"tlp network add {lacking[0]} --builtin {lacking[0]}"
    named = "".join(f" --network {network.name}" for network in able)
    return f"tlp measure {device.name} --samples {max(200, programs * len(workloads))}{named}"
