"""The gate's verdict as people see it: a page in Markdown and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tlp.training.judge.verdict import PASSED, Verdict

COLUMNS: Final = (
    "device",
    "figure",
    "candidate",
    "reference",
    "against",
    "difference",
    "low",
    "high",
    "p",
    "verdict",
)
_HEADLINES: Final = {
    Verdict.PASSED: "passed the gate",
    Verdict.WORSE: "stopped by the gate",
    Verdict.NOT_ENOUGH_EVIDENCE: "is undecided, the gate has not enough evidence",
}


def table(gate: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Column → one value per comparison of a verdict's JSON; what MLflow shows as a table."""
    rows = [dict(c) | {"difference": c["candidate"] - c["reference"]} for c in gate.get("comparisons", ())]
    values = {name: [_cell(row.get(name)) for row in rows] for name in COLUMNS} if rows else {}
    return {name: [round(v, 6) if isinstance(v, float) else v for v in column] for name, column in values.items()}


def _cell(value: Any) -> Any:
    return "" if value is None else value


def page(facts: Mapping[str, Any]) -> str:
    """Markdown: what was decided and why, the figures, what it was trained on.

    Args:
        facts: `RetrainResult.to_json`, or what is known of it. Without a gate nothing was trained: the page says why.
    """
    gate: Mapping[str, Any] = facts.get("gate") or {}
    blocks = [_headline(facts, gate)]
    blocks += [f"> {_flat(warning)}" for warning in facts.get("warnings", ())]
    telling = [_flat(reason) for reason in gate.get("reasons", ()) if not reason.endswith((": ok", PASSED))]
    blocks.append("\n".join(f"- {reason}" for reason in telling))  # the others are in the table
    blocks.append(_comparisons(gate.get("comparisons", ())))
    blocks.append(_origin(facts))
    return "\n\n".join(block for block in blocks if block)


def _headline(facts: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    if not gate:
        return f"**{facts['model']}**: {_flat(facts.get('reason', ''))}"
    verdict = _HEADLINES[Verdict(gate["verdict"])]
    if facts.get("version") is None:
        return verdict  # MLflow's table of versions shows this line as it stands
    promoted = "promoted" if facts.get("promoted") else "not promoted"
    said = _flat(facts.get("reason", ""))
    # The reasons stand below; what else there is to say (a person decided otherwise meanwhile) stands here.
    rest = "" if said == _flat("; ".join(gate.get("reasons", ()))) else f": {said}"
    return f"**{facts['model']} version {facts['version']}** {verdict}, {promoted}{rest}"


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    if not comparisons:
        return ""
    lines = ["| device | | candidate | reference | difference | bounds | |", "|---|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {c['device']} | {c['figure']} | {c['candidate']:.3f} | {c['reference']:.3f} ({c['against']}) "
        f"| {c['candidate'] - c['reference']:+.3f} | {c['low']:+.3f} … {c['high']:+.3f} | {c.get('verdict', '')} |"
        for c in comparisons
    ]
    return "\n".join(lines)


def _origin(facts: Mapping[str, Any]) -> str:
    parts = []
    if facts.get("samples"):
        parts.append("samples: " + ", ".join(f"{name} {count}" for name, count in facts["samples"].items()))
    if facts.get("strategy"):
        parts.append(f"strategy: {facts['strategy']}")
    if "parent" in facts:
        parts.append(f"started from: {'version ' + str(facts['parent']) if facts['parent'] else 'new weights'}")
    if facts.get("watermark") is not None:
        parts.append(f"watermark: {facts['watermark']}")
    return " · ".join(parts)


def _flat(text: str) -> str:
    return " ".join(str(text).split())
