"""A gate's verdict as a page and as a table: MLflow's description of a version, and Prefect's artifact.

Everything is made from JSON (`RetrainResult.to_json`, `GateVerdict.to_json`), so that flows can do it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

COLUMNS: Final = ("device", "k", "candidate", "reference", "against", "difference", "low", "high", "verdict")


def table(gate: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Column → one value per comparison; what MLflow shows as a table. Intervals are one-sided 95%."""
    rows = [_row(comparison) for comparison in gate.get("comparisons", ())]
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)} if rows else {}


def _row(c: Mapping[str, Any]) -> tuple[Any, ...]:
    difference = round(c["candidate"] - c["reference"], 6)
    scores = (round(c["candidate"], 6), round(c["reference"], 6))
    bounds = (round(c["low"], 6), round(c["high"], 6))
    return (c["device"], c["k"], *scores, c["against"], difference, *bounds, c.get("verdict", ""))


def page(facts: Mapping[str, Any]) -> str:
    """Markdown: what was decided and why, the figures, what it was trained on.

    Args:
        facts: `gate`, and what is known of `model, version, promoted, reason, warnings, samples, strategy, parent,
            watermark`. Without a gate nothing was trained, and the page says why.
    """
    gate: Mapping[str, Any] = facts.get("gate") or {}
    blocks = [_headline(facts, gate)]
    blocks += [f"> {_flat(warning)}" for warning in facts.get("warnings", ())]
    telling = [
        _flat(reason) for reason in gate.get("reasons", ()) if not reason.endswith(": ok")
    ]  # those are the table
    if telling:
        blocks.append("\n".join(f"- {reason}" for reason in telling))
    if gate.get("comparisons"):
        blocks.append(_comparisons(gate["comparisons"]))
    origin = _origin(facts)
    if origin:
        blocks.append(origin)
    return "\n\n".join(blocks)


def _headline(facts: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    if not gate:
        return f"**{facts['model']}**: {_flat(facts.get('reason', ''))}"
    verdict = "passed the gate" if gate["passed"] else "stopped by the gate"
    if facts.get("version") is None:
        return verdict  # MLflow's table of versions shows this line as it stands
    promoted = "promoted" if facts.get("promoted") else "not promoted"
    said = _flat(facts.get("reason", ""))
    # The reasons stand below; what else there is to say (a person decided otherwise meanwhile) stands here.
    rest = "" if said == _flat("; ".join(gate.get("reasons", ()))) else f": {said}"
    return f"**{facts['model']} version {facts['version']}** {verdict}, {promoted}{rest}"


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| device | | candidate | reference | difference | 95% bounds | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {c['device']} | top-{c['k']} | {c['candidate']:.3f} | {c['reference']:.3f} ({c['against']}) "
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
