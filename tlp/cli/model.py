"""`tlp model`: list, show, promote, rollback, history."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command, group, state
from tlp.core.fleet import Fleet
from tlp.core.progress import say

Version = Annotated[str, typer.Argument(metavar="VERSION", help="Version number.")]
Family = Annotated[
    str | None, typer.Option(help="ISA family; needed only if the fleet has several. felix-FAMILY: Felix's cost model.")
]
Reason = Annotated[str, typer.Option(help="Why; goes into the history.")]


def app() -> typer.Typer:
    """The group."""
    sub = group("model", "Versions of the model in the registry, and which one is promoted.", example="tlp model list")
    command(sub, "list", example="tlp model list")(list_versions)
    command(sub, "show", example="tlp model show champion")(show)
    command(sub, "promote", example='tlp model promote 3 --reason "better on the workstation"')(promote)
    command(sub, "rollback", example='tlp model rollback --reason "tuning got slower"')(rollback)
    command(sub, "history", example="tlp model history --json")(history)
    return sub


def list_versions(family: Family = None) -> Output:
    """List the versions of the registered models, newest first, with their aliases."""
    from tlp.report import models

    fleet = open_all()
    rows = [_row(version) for version in fleet.registry.list_versions(family)]
    return Output(rows, lambda: models.versions(rows))


def show(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Version number or alias.")] = "champion",
    family: Family = None,
) -> Output:
    """Show one version: what it was trained on, its scores, the verdict of the gate."""
    from tlp.report import models

    fleet = open_all()
    chosen = _family(fleet, family)
    found = fleet.registry.show(chosen, fleet.registry.resolve(chosen, ref=version).version)
    row = _row(found) | {"tags": dict(found.tags), "metrics": dict(found.metrics), "rejected": found.rejected}
    return Output(row, lambda: models.version_detail(row))


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
    from storage import Actor
    from tlp.registry import pin_alias

    wanted = _number(version)
    fleet = open_all()
    if device is not None:
        family = fleet.store.get_device(device).family
    chosen = _family(fleet, family)
    found = fleet.registry.resolve(chosen, ref=wanted)
    number = found.version
    if found.tags.get("gate") == "failed":
        say(f"version {number} did not pass the gate, and is promoted because you say so: tlp model show {number}")
    alias = "champion" if device is None else pin_alias(device)
    from tlp.registry import model_name

    event = fleet.registry.promote(chosen, number, reason=reason, by=Actor.PERSON, alias=alias)
    return _moved(event, f"{alias} of {model_name(chosen)} is version {number} already")


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
    if device is not None:
        family = fleet.store.get_device(device).family
    chosen = _family(fleet, family)
    return _moved(fleet.registry.rollback(chosen, number, device=device, reason=reason), "")


def history(family: Family = None) -> Output:
    """Every move of an alias, ours or a person's, oldest first."""
    from tlp.report import models

    fleet = open_all()
    fleet.registry.reconcile()
    rows = [_event(event) for event in fleet.registry.history(family)]
    return Output(rows, lambda: models.history(rows, verbose=state.verbose))


def _number(version: str) -> str:
    from tlp.core.errors import InvalidInputError

    if not version.removeprefix("v").isdecimal():
        raise InvalidInputError(f"{version!r} is not a version number", next_command="tlp model list")
    return version.removeprefix("v")


def _family(fleet: Fleet, family: str | None) -> str:
    """The family meant: the one given, else the only one that has a model."""
    from tlp.core.errors import InvalidInputError, NotFoundError

    if family is not None:
        return family
    from tlp.registry import family_of, model_name

    known: list[str] = sorted({family_of(v.model) for v in fleet.registry.list_versions()})
    plain = [key for key in known if model_name(key) != key]
    known = plain or known  # a model beside MTL-TLP's is meant only if it is named
    if not known:
        raise NotFoundError(
            "no model is registered yet", next_command="tlp train" if fleet.store.watermark() else "tlp demo"
        )
    if len(known) > 1:
        raise InvalidInputError(
            f"there are models of {', '.join(known)}: say which one is meant",
            next_command=f"tlp model list --family {known[0]}",
        )
    return known[0]


def _row(version: Any) -> dict[str, Any]:
    from tlp.registry import pin_alias

    tags = version.tags
    return {
        "model": version.model,
        "version": str(version.version),
        "aliases": list(version.aliases),
        "pins": [alias.removeprefix(pin_alias("")) for alias in version.aliases if alias.startswith(pin_alias(""))],
        "created_at": version.created_at,
        "top1": float(tags["top1"]) if "top1" in tags else None,
        "top5": float(tags["top5"]) if "top5" in tags else None,
        "gate": tags.get("gate"),
        "rejected": version.rejected,
    }


def _event(event: Any) -> dict[str, Any]:
    return {
        "at": event.at,
        "model": event.model,
        "alias": event.alias,
        "from": event.from_version,
        "to": event.to_version,
        "by": event.by.value,
        "reason": event.reason,
    }


def _moved(event: Any, unchanged: str) -> Output:
    from tlp.report import models

    if event is None:
        return Output([], lambda: unchanged)
    row = _event(event)
    return Output([row], lambda: models.history([row], verbose=True))
