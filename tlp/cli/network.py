"""`tlp network`: add, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command, group

EXAMPLE = "tlp network add resnet_18 --builtin resnet_18"
app = group("network", "The networks whose subgraphs are measured and tuned.", example=EXAMPLE)


@command(app, "add", example=EXAMPLE)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the network from now on.")],
    builtin: Annotated[str | None, typer.Option(help="A network that comes with this program, e.g. resnet_18.")] = None,
    torch: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="A function returning (torch module in eval mode, example args)."),
    ] = None,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="An ONNX file with static shapes.")] = None,
    holdout: Annotated[
        bool | None,
        typer.Option(
            "--holdout/--no-holdout",
            help="Keep it out of training and use it for evaluation; default: the paper's hold-out networks are.",
        ),
    ] = None,
) -> Output:
    """Add a network: it is imported, split into subgraphs, and these are stored as workloads."""
    from storage.names import validate_name
    from tlp.core.errors import AlreadyExistsError, InvalidInputError, NotFoundError
    from tlp.report import work

    validate_name("network", name)
    given = {"builtin": builtin, "torch": torch, "onnx": str(onnx.absolute()) if onnx else None}
    sources = [f"{kind}:{value}" for kind, value in given.items() if value]
    if len(sources) != 1:
        raise InvalidInputError(
            f"give exactly one of --builtin, --torch and --onnx, {len(sources)} given",
            next_command=f"tlp network add {name} --builtin resnet_18",
        )
    fleet = open_all()
    try:
        fleet.store.get_network(name)
    except NotFoundError:
        pass
    else:
        raise AlreadyExistsError(f"network {name!r} is there already", next_command="tlp network list")
    from tlp.core.progress import say
    from tlp.programs import networks

    network, workloads = networks.build_network(
        name, sources[0], holdout=holdout, on_progress=lambda what: say(f"{name}: {what}")
    )
    fleet.store.add_network(network, workloads)
    row = _row(network)
    return Output(row, lambda: work.networks([row]))


@command(app, "list", example="tlp network list --json")
def list_networks() -> Output:
    """List the networks with their number of tasks, and whether they are held out."""
    from tlp.report import work

    rows = [_row(network) for network in open_all().store.list_networks()]
    return Output(rows, lambda: work.networks(rows))


def _row(network: Any) -> dict[str, Any]:
    row = {key: getattr(network, key) for key in ("name", "holdout", "source", "added_at")}
    return row | {"tasks": len(network.tasks)}
