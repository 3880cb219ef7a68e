"""Which head to use for a device that has none: the one of the most similar target in the same family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tlp.core.errors import InvalidInputError
from tlp.model.checkpoint import Model

MIN_SHARED = 5  # programs of a workload that two devices must have in common for a rank correlation to say anything

# x86-64 psABI level of LLVM's CPU names, by prefix; the longest prefix that fits counts.
_X86_LEVELS = {
    4: "x86-64-v4 znver4 znver5 skylake-avx512 cascadelake cooperlake cannonlake icelake rocketlake tigerlake "
    "sapphirerapids emeraldrapids graniterapids diamondrapids",
    3: "x86-64-v3 znver knl knm haswell broadwell skylake core-avx2 alderlake raptorlake meteorlake arrowlake "
    "lunarlake bdver4",
    2: "x86-64-v2",
    1: "x86-64",
}


def x86_level(target: Mapping[str, Any]) -> int:
    """The vector level of an x86 target, 1 to 4 (x86-64-v1 … v4); AVX-512 or AVX2 switched off counts."""
    mcpu = str(target.get("mcpu", ""))
    known = ((prefix, level) for level, names in _X86_LEVELS.items() for prefix in names.split())
    level = max(((len(prefix), level) for prefix, level in known if mcpu.startswith(prefix)), default=(0, 2))[1]
    off = set(target.get("mattr", ()))
    if level == 4 and "-avx512f" in off:
        level = 3
    if level == 3 and ("-avx2" in off or "-avx" in off):
        level = 2
    return level


def similarity(
    a: Mapping[str, Any], b: Mapping[str, Any], correlation: float | None = None
) -> tuple[int, float, int, int]:
    """How alike two targets of one family are; larger is more alike, compared field by field.

    Fields: minus the distance of the x86 vector levels (0 in other families), the rank correlation on programs that
    both have measured (0 if there is none: nothing is known), same mcpu (or GPU architecture), minus the distance of
    `num-cores`.
    """
    is_x86 = "mcpu" in a and "mcpu" in b and "arm" not in f"{a.get('mtriple')}{b.get('mtriple')}"
    levels = abs(x86_level(a) - x86_level(b)) if is_x86 else 0
    same = int(a.get("mcpu", a.get("arch")) == b.get("mcpu", b.get("arch")))
    cores = abs(int(a.get("num-cores", 1)) - int(b.get("num-cores", 1)))
    return -levels, correlation or 0.0, same, -cores


def rank_correlations(
    workload: npt.NDArray[np.int64], values: npt.NDArray[np.floating[Any]], column: int
) -> npt.NDArray[np.float64]:
    """Spearman's rank correlation of one device with each, per workload on programs that both have, averaged.

    `workload`: `(P,)` numbers, equal ones side by side. `values`: `(P, H)` latency, or what rises or falls with it
    on all devices alike; NaN: not measured. `column`: the device's. The means `(H,)` are over workloads with at least
    `MIN_SHARED` programs in common that neither device ranks all alike; NaN: there is none.
    """
    starts = np.flatnonzero(np.r_[True, np.diff(workload) != 0])
    correlations: list[list[float]] = [[] for _ in range(values.shape[1])]
    known = ~np.isnan(values)
    for start, stop in zip(starts, [*starts[1:], len(workload)], strict=True):
        for other, rhos in enumerate(correlations):
            both = start + np.flatnonzero(known[start:stop, column] & known[start:stop, other])
            if len(both) >= MIN_SHARED:
                ranks, other_ranks = _ranks(values[both, column]), _ranks(values[both, other])
                if ranks.std() > 0 and other_ranks.std() > 0:
                    rhos.append(float(np.corrcoef(ranks, other_ranks)[0, 1]))
    return np.array([np.mean(rhos) if rhos else np.nan for rhos in correlations])


def _ranks(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Ranks from 0, equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts + 1) / 2.0)[place]
    return ranks


def nearest_head(
    checkpoint: Model,
    device: str,
    target: Mapping[str, Any] | None,
    family: str | None,
    *,
    correlations: Mapping[str, float] | None = None,
) -> str:
    """The head that scores for `device`: its own, else the most similar (ties: most samples, then name).

    `correlations`: head → rank correlation with the device (`rank_correlations`); None: nothing is known.
    Raises InvalidInputError: it has no head, and the family is another or the target is not known.
    """
    if device in checkpoint.heads:
        return device
    manifest, known = checkpoint.manifest, correlations or {}
    if target is None or family is None:
        problem = f"the model has no head for {device!r}, only for {', '.join(checkpoint.heads)}"
    elif family != manifest.family:
        problem = f"device {device!r} is of family {family!r}, the model of {manifest.family!r}"
    else:
        likeness = {
            head: (similarity(target, manifest.targets.get(head, {}), known.get(head)), manifest.samples.get(head, 0))
            for head in sorted(checkpoint.heads)
        }
        return max(likeness, key=likeness.__getitem__)
    raise InvalidInputError(problem, next_command=f"tlp train --device {device}")
