"""The dry run of a tuning night: what is left out is said once, by reason."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tlp.report import night

STARTER = "came with the data set starter: nothing to compile"


def report(**more: Any) -> dict[str, Any]:
    left_out = {f"network starter-{index}": STARTER for index in range(17)} | {"device new": "enrolled, never trained"}
    empty: dict[str, Any] = {
        "pairs": [],
        "waiting": [],
        "warnings": [],
        "budget": 640,
        "spent_before": 0,
        "left_out": left_out,
    }
    return empty | {"reason": "nothing to do: " + "; ".join(night.left_out(left_out))} | more


def test_what_is_left_out_for_one_reason_is_one_line() -> None:
    assert night.dry_run(report()) == [
        "budget: 640 programs",
        "left out: 17 networks (starter-0, starter-1, starter-2, starter-3 and 13 more): "
        "came with the data set starter: nothing to compile",
        "left out: device new: enrolled, never trained",
        "nothing to do",
    ]


def test_reasons_of_pairs_are_not_repeated() -> None:
    pair = {"network": "one", "device": "cpu", "due": True, "resume": False, "numbers": {}, "need": 16, "share": 16}
    pair["reason"] = "one on cpu: never tuned with a champion"
    table, *lines = night.dry_run(report(pairs=[pair], left_out={}, reason=f"would tune: {pair['reason']}"))
    assert isinstance(table, Table) and all(column.header for column in table.columns)
    assert lines == [pair["reason"], "would tune 1 of 1 pairs of network and device"]


def test_a_reason_that_stands_nowhere_else_is_kept() -> None:
    nothing = "nothing to do: there are no devices and no networks"
    assert night.dry_run(report(left_out={}, reason=nothing))[-1] == nothing
    waits = {"network": "one", "device": "cpu", "reason": "the night's 4 h are over"}
    ended = "1 waiting of 1 due; 0 of 640 programs"
    assert night.dry_run(report(waiting=[waits], reason=ended))[-1] == ended
