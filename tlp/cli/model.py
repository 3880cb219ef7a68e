"""`tlp model`: list, show, promote, rollback, hold, release, history."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from storage import Actor, ModelEvent, ReasonCode
from tlp.cli._context import Reason, open_all
from tlp.cli._output import Output, command, group, state
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.registry import ModelVersion, pin_alias

Version = Annotated[str, typer.Argument(metavar="VERSION", help="Version number.")]
Family = Annotated[
    str | None, typer.Option(help="ISA family; needed only if the fleet has several. felix-FAMILY: Felix's cost model.")
]


app = group("model", "Versions of the model in the registry, and which one is promoted.", example="tlp model list")


@command(app, "list", example="tlp model list")
def list_versions(family: Family = None) -> Output:
    """List the versions of the registered models, newest first, with their aliases."""
    from tlp.report import models

    rows = [_row(version) for version in open_all().registry.list_versions(family)]
    return Output(rows, lambda: models.versions(rows))


@command(app, "show", example="tlp model show champion")
def show(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Version number or alias.")] = "champion",
    family: Family = None,
) -> Output:
    """Show one version: what it was trained on, its scores, the verdict of the gate."""
    from tlp.report import models

    fleet = open_all()
    key = _key(fleet, family)
    shown = fleet.registry.show(key, fleet.registry.resolve(key, ref=version).version)
    row = _row(shown) | {"tags": dict(shown.tags), "metrics": dict(shown.metrics)}
    return Output(row, lambda: models.version_detail(row))


@command(app, "promote", example='tlp model promote 3 --reason "better on the workstation"')
def promote(
    version: Version,
    reason: Reason = "promoted by a person",
    device: Annotated[str | None, typer.Option(help="Pin only this device to the version.")] = None,
    family: Family = None,
) -> Output:
    """Move the alias champion to a version; the next tuning run uses it.

    Going back to an older version tags the one left behind as rejected: the pipeline will not promote it again. A
    rejected version that is promoted here is rejected no longer.
    """
    ref = _number(version)
    fleet = open_all()
    key = _key(fleet, family, device)
    resolved = fleet.registry.resolve(key, ref=ref)
    number = resolved.version
    if resolved.tags.get("gate", "passed") != "passed":
        say(f"version {number} did not pass the gate, and is promoted because you say so: tlp model show {number}")
    alias = "champion" if device is None else pin_alias(device)
    event = fleet.registry.promote(key, number, reason=reason, by=Actor.PERSON, alias=alias)
    return _moved(event, f"{alias} of {resolved.model} is version {number} already")


@command(app, "rollback", example='tlp model rollback --reason "tuning got slower"')
def rollback(
    to: Annotated[
        str | None, typer.Option(help="Version to go to; default: the champion before this one that is not rejected.")
    ] = None,
    reason: Reason = "rolled back by a person",
    device: Annotated[str | None, typer.Option(help="Only for this device.")] = None,
    family: Family = None,
) -> Output:
    """Go back to an earlier champion; the pipeline will not promote the version left behind again."""
    number = None if to is None else int(_number(to))
    fleet = open_all()
    key = _key(fleet, family, device)
    return _moved(fleet.registry.rollback(key, number, device=device, reason=reason), "")


Held = Annotated[str | None, typer.Option(help="Only this device: it keeps the version it uses.")]


@command(app, "hold", example='tlp model hold --reason "a demonstration until Friday"')
def hold(reason: Reason = "held by a person", device: Held = None, family: Family = None) -> Output:
    """Promote nothing until it is released; training and registering go on.

    The same as the tag hold = true on the model's page in MLflow (hold-DEVICE for one device).
    """
    fleet = open_all()
    key = _key(fleet, family, device)
    fleet.registry.hold(key, reason, device=device)
    return _held(key, device, True, "is held until: tlp model release" + (f" --device {device}" if device else ""))


@command(app, "release", example="tlp model release")
def release(reason: Reason = "released by a person", device: Held = None, family: Family = None) -> Output:
    """End a hold; a version that passed meanwhile is promoted by the next flow, if no other was since."""
    fleet = open_all()
    key = _key(fleet, family, device)
    was_held = fleet.registry.release(key, reason, device=device)
    after = "is released; what passed meanwhile is promoted by the next retraining or tuning run"
    return _held(key, device, False, after if was_held else "was not held")


@command(app, "history", example="tlp model history --json")
def history(family: Family = None) -> Output:
    """Every move of an alias, ours or a person's, oldest first."""
    from tlp.report import models

    fleet = open_all()
    fleet.registry.reconcile()
    rows = [_event(event) for event in fleet.registry.history(family)]
    return Output(rows, lambda: models.history(rows, verbose=state.verbose))


def _held(key: str, device: str | None, held: bool, text: str) -> Output:
    from tlp.registry import model_name

    row = {"model": model_name(key), "device": device, "held": held}
    return Output(row, lambda: f"{row['model']}{f' for {device}' if device else ''} {text}")


def _number(version: str) -> str:
    if not version.removeprefix("v").isdecimal():
        raise InvalidInputError(f"{version!r} is not a version number", next_command="tlp model list")
    return version.removeprefix("v")


def _key(fleet: Fleet, family: str | None, device: str | None = None) -> str:
    """The family meant: the device's, else the one given, else the only one that has a model."""
    from tlp.registry import family_of, model_name

    if device is not None:
        return fleet.store.get_device(device).family
    if family is not None:
        return family
    keys = sorted({family_of(version.model) for version in fleet.registry.list_versions()})
    keys = [key for key in keys if model_name(key) != key] or keys  # one beside MTL-TLP's is meant only if it is named
    if not keys:
        command = "tlp train" if fleet.store.watermark() else "tlp demo"
        raise NotFoundError("no model is registered yet", next_command=command)
    if len(keys) > 1:
        raise InvalidInputError(
            f"there are models of {', '.join(keys)}: say which one is meant",
            next_command=f"tlp model list --family {keys[0]}",
        )
    return keys[0]


def _row(version: ModelVersion) -> dict[str, Any]:
    tags, pin = version.tags, pin_alias("")
    return {
        "model": version.model,
        "version": str(version.version),
        "aliases": list(version.aliases),
        "pins": [alias.removeprefix(pin) for alias in version.aliases if alias.startswith(pin)],
        "created_at": version.created_at,
        "top1": float(tags["top1"]) if "top1" in tags else None,
        "top5": float(tags["top5"]) if "top5" in tags else None,
        "gate": tags.get("gate"),
        "rejected": version.rejected,
    }


def _event(event: ModelEvent) -> dict[str, Any]:
    row = {key: getattr(event, key) for key in ("at", "model", "alias", "by", "reason")}
    if event.code in (ReasonCode.HELD, ReasonCode.RELEASED):
        row["reason"] = f"{event.code}: {event.reason}"
    return row | {"from": event.from_version, "to": event.to_version}


def _moved(event: ModelEvent | None, unchanged: str) -> Output:
    from tlp.report import models

    rows = [] if event is None else [_event(event)]
    return Output(rows, lambda: models.history(rows, verbose=True) if rows else unchanged)
