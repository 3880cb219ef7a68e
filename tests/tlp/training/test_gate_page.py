"""The gate's verdict as Markdown and as a table."""

from __future__ import annotations

from tlp.training.judge import gate_page as gate
from tlp.training.judge.verdict import Comparison, GateVerdict, Verdict

VERDICT = GateVerdict(
    Verdict.WORSE,
    ("gpu0: choice fell",),
    (
        Comparison("cpu0", "choice", 0.9, 0.8, "champion", 0.05, 0.15, 0.001),
        Comparison("gpu0", "choice", 0.7, 0.8, "champion", -0.2, -0.01, 1.0, "worse than the champion beyond noise"),
        Comparison("gpu0", "top-1", 0.7, 0.8, "champion", -0.2, -0.01, None, "shown only"),
    ),
    ("gpu1",),
)


def test_the_verdict_comes_back() -> None:
    assert GateVerdict.from_json(VERDICT.to_json()) == VERDICT


def test_the_table_has_a_row_per_comparison() -> None:
    table = gate.table(VERDICT.to_json())
    assert tuple(table) == gate.COLUMNS
    assert table["difference"] == [0.1, -0.1, -0.1] and table["p"] == [0.001, 1.0, ""]
    assert table["verdict"] == ["ok", "worse than the champion beyond noise", "shown only"]
    assert gate.table({}) == {}


def test_the_page_says_what_was_decided_and_why() -> None:
    facts = {
        "model": "mtl-tlp-x86_64",
        "version": "4",
        "promoted": False,
        "reason": "gpu0: choice fell",
        "gate": VERDICT.to_json(),
        "warnings": ["the champion\ncannot be used"],
        "samples": {"cpu0": 10},
        "parent": "3",
        "watermark": 7,
    }
    page = gate.page(facts)
    assert page.startswith("**mtl-tlp-x86_64 version 4** stopped by the gate, not promoted\n")
    assert "> the champion cannot be used" in page and "- gpu0: choice fell" in page
    assert "| gpu0 | top-1 | 0.700 | 0.800 (champion) | -0.100 | -0.200 … -0.010 | shown only |" in page
    assert "samples: cpu0 10 · started from: version 3 · watermark: 7" in page
    passed = facts | {"gate": VERDICT.to_json() | {"verdict": "passed"}, "reason": "a person moved it meanwhile"}
    assert "passed the gate, not promoted: a person moved it meanwhile" in gate.page(passed)
    unclear = facts | {"gate": VERDICT.to_json() | {"verdict": "not_enough_evidence"}}
    assert "is undecided, the gate has not enough evidence, not promoted" in gate.page(unclear)


def test_a_page_where_nothing_was_trained() -> None:
    facts = {
        "model": "mtl-tlp-x86_64",
        "version": None,
        "promoted": False,
        "reason": "nothing to do: 0 new",
        "gate": {},
    }
    assert gate.page(facts) == "**mtl-tlp-x86_64**: nothing to do: 0 new"
