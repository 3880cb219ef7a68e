"""`tlp device`: enroll, list, show, retire, resume."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from storage import DeviceState, ReasonCode
from tlp.cli._context import Reason, open_all
from tlp.cli._output import Output, command, group, state
from tlp.core.errors import UserError
from tlp.core.fleet import Fleet

Name = Annotated[str, typer.Argument(metavar="NAME", help="Device name.")]


app = group("device", "The devices of the fleet.", example="tlp device enroll workstation")


@command(app, "enroll", example="tlp device enroll workstation --min-samples 20000")
def enroll_device(
    name: Name,
    target: Annotated[
        str | None,
        typer.Option(
            help="TVM target as JSON, a TVM tag such as nvidia/geforce-rtx-3090 or raspberry-pi/4b-aarch64, or an LLVM "
            "mcpu such as x86-64-v3; default: what this machine is."
        ),
    ] = None,
    min_samples: Annotated[
        int | None, typer.Option(help="OK samples before the device becomes a task of the model (default 500000).")
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="TVM RPC tracker, for boards and other machines.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Key of the boards at the tracker; boards of one kind share it.")
    ] = None,
    cc: Annotated[
        str | None,
        typer.Option(
            metavar="COMPILER",
            help="C++ compiler that links for the boards, e.g. aarch64-linux-gnu-g++; default: the one of the target's "
            "triple if installed, else the board's own.",
        ),
    ] = None,
) -> Output:
    """Enroll this machine, or boards behind a TVM RPC tracker, as a device.

    Finds the target (or checks the one given), compiles a small kernel for it and runs it, and only then writes the
    device down: a target the CPU cannot run is refused. With --tracker the way to the board is checked step by step
    (tracker, key, free server, kernel compiled, uploaded, run, result) and the step that fails is named; several boards
    of one key are one device and measure in parallel.
    """
    from tlp.measure import enroll
    from tlp.measure.endpoint import RpcEndpoint

    if (tracker is None) != (key is None) or (cc is not None and tracker is None):
        raise UserError(
            "--tracker and --key go together, --cc needs both",
            next_command=f"tlp device enroll {name} --tracker HOST:9190 --key rpi4 --target raspberry-pi/4b-aarch64",
        )
    fleet = open_all()
    given: dict[str, Any] = {"target": target, "min_samples": min_samples}
    if tracker is not None and key is not None:
        enroll.enroll_rpc(fleet, name, RpcEndpoint(tracker=tracker, key=key, cc=cc), **given)
    else:
        enroll.enroll(fleet, name, **given)
    return _shown(fleet, name, f"next: tlp measure {name} --samples 100")


@command(app, "list", example="tlp device list --json")
def list_devices() -> Output:
    """List the devices with their states and quotas."""
    from tlp.report import fleet as tables
    from tlp.services import status

    rows = status.collect(open_all())["devices"]
    return Output(rows, lambda: tables.devices(rows))


@command(app, "show", example="tlp device show workstation")
def show(name: Name) -> Output:
    """Show one device: state, quota, target, facts and history."""
    return _shown(open_all(), name)


@command(app, "retire", example='tlp device retire workstation --reason "sold"')
def retire(name: Name, reason: Reason = "retired by a person") -> Output:
    """Give a device no new work; its samples and its head in the model are kept."""
    fleet = open_all()
    fleet.store.set_device_state(name, DeviceState.RETIRED, reason, code=ReasonCode.RETIRED)
    return _shown(fleet, name)


@command(app, "resume", example="tlp device resume workstation")
def resume(
    name: Name,
    reason: Reason = "resumed by a person",
    rebase_canary: Annotated[
        bool,
        typer.Option("--rebase-canary", help="Take the machine as it is now: the next canary becomes the reference."),
    ] = False,
) -> Output:
    """Take a retired or quarantined device back into work, or accept that its machine has changed."""
    from tlp.fleet import states
    from tlp.measure import canary

    fleet = open_all()
    if not rebase_canary or fleet.store.get_device(name).state in states.OUT_OF_WORK:
        states.resume(fleet.store, name, reason)
    if rebase_canary:
        canary.rebase(fleet.store, name, reason)
    return _shown(fleet, name)


def _shown(fleet: Fleet, name: str, *more: str) -> Output:
    from tlp.report import fleet as tables
    from tlp.services import status

    detail = status.device_detail(fleet, name)
    return Output(detail, lambda: [*tables.device_detail(detail, verbose=state.verbose), *more])
