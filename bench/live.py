"""How often a fall of the live quality is called: of a model that never changes, and of one that really fell.

Everything is simulated from one generator of tuning rounds; `tlp.fleet.quality.compare` judges after every night, as
`tlp status` and the nightly retraining do. A history counts as called if any of its nights says that the version fell.

**The world.** A program of a workload has a true log-latency and a score: minus the log-latency plus an error that
belongs to the program. How hard a workload is for the model (spread of its latencies, size of the errors) differs by
an order of magnitude. **Tuning narrows**: with every round of a workload the programs are more alike, down to a
fifth of the first spread; most of a round are the model's favourites among what the search could propose, two are
random. **Networks change**: a night tunes some workloads that were tuned before with this version, the others are new
to it; where new ones are *harder*, those of each night are harder than those of the night before, which is what made a
comparison across workloads see a fall in every history.

**A fall** happens before night `FALL_AT`: noise is added to every score, so much that the pair accuracy is down by
about 0.20 (printed: how far it was in the pairs compared on the last night).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from storage import RoundQuality
from tlp.core.settings import Settings
from tlp.fleet import quality

T0 = datetime(2026, 1, 1, tzinfo=UTC)
FALL_AT = 3  # nights before the fall
ROUND = 10  # programs
FAVOURITES = 8  # of a round, the rest are random
FALL = 3.5  # noise of the scores after a fall, in spreads of a workload's latencies: the accuracy is down by about 0.20


@dataclass
class Scene:
    """One kind of history."""

    returning: float  # share of a night's workloads that were tuned before with this version
    fall: float = 0.0  # how much noisier scores are after `FALL_AT` nights, in spreads of a workload's latencies
    harder: bool = False  # new workloads are harder every night
    nights: int = 6
    workloads: int = 16  # of a night
    rounds: int = 3  # of a workload in a night


class Workload:
    """What a model is asked to rank: spread of log-latencies, its error in them, rounds so far."""

    def __init__(self, name: str, rng: np.random.Generator, hardness: float) -> None:
        self.name = name
        self.spread = float(np.exp(rng.normal(np.log(0.5), 0.3)))
        self.error = self.spread * float(np.exp(rng.normal(np.log(0.6), 0.35))) * hardness
        self.rounds = 0

    def next_round(self, rng: np.random.Generator, fall: float) -> tuple[np.ndarray, np.ndarray]:
        """Scores and latencies of the next round: its pool is narrower than the one before."""
        narrow = max(0.2, 0.85**self.rounds)
        self.rounds += 1
        pool = 64
        latency = np.concatenate([narrow * rng.normal(size=pool), rng.normal(size=ROUND - FAVOURITES)]) * self.spread
        score = -latency + self.error * rng.normal(size=len(latency))
        score += fall * self.spread * rng.normal(size=len(latency))
        taken = np.argsort(-score[:pool])[:FAVOURITES]
        chosen = np.concatenate([taken, np.arange(pool, len(latency))])
        return score[chosen], np.exp(latency[chosen])


def nights(scene: Scene, rng: np.random.Generator) -> list[list[RoundQuality]]:
    """The rounds of every night of one history."""
    known: list[Workload] = []
    history: list[list[RoundQuality]] = []
    for night in range(scene.nights):
        hardness = 1.5**night if scene.harder else 1.0
        back = round(scene.returning * scene.workloads) if night else 0
        chosen = [known[i] for i in rng.choice(len(known), min(back, len(known)), replace=False)]
        fresh = [Workload(f"{night}-{i}", rng, hardness) for i in range(scene.workloads - len(chosen))]
        known += fresh
        rows: list[RoundQuality] = []
        for _ in range(scene.rounds):
            for workload in (*chosen, *fresh):
                rows.append(_row(workload, rng, scene.fall if night >= FALL_AT else 0.0, night, len(rows)))
        history.append(rows)
    return history


def _row(workload: Workload, rng: np.random.Generator, fall: float, night: int, number: int) -> RoundQuality:
    visit = workload.rounds
    scores, latencies_s = workload.next_round(rng, fall)
    counts = quality.count_pairs(scores.tolist(), latencies_s.tolist(), tie_margin=0.05)
    at = T0 + timedelta(days=night, minutes=number)
    return RoundQuality("run", "cpu0", "1", workload.name, at, visit, **vars(counts))


def judge(history: list[list[RoundQuality]], settings: Settings) -> tuple[bool, list[quality.Comparison]]:
    """Whether any night calls a fall, and the comparisons that could be made."""
    rows: list[RoundQuality] = []
    comparisons = []
    for night in history:
        rows += night
        if (comparison := quality.compare(rows, settings)) is not None:
            comparisons.append(comparison)
    return any(c.at_least > settings.live_accuracy_drop for c in comparisons), comparisons


def run(scene: Scene, histories: int, seed: int, settings: Settings) -> dict[str, float]:
    """Share of histories that are called a fall, and what the last comparison of each saw."""
    called, falls, judged = 0, [], 0
    for number in range(histories):
        rng = np.random.default_rng([seed, number])
        alarm, comparisons = judge(nights(scene, rng), settings)
        called += alarm
        judged += bool(comparisons)
        falls += [comparisons[-1].fall] if comparisons else []
    return {
        "called": called / histories,
        "judged": judged / histories,
        "fall": float(np.mean(falls)) if falls else float("nan"),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fall", type=float, default=FALL, help="noise of the scores after the fall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings, rows = Settings(), []
    for fall in (0.0, args.fall):
        for returning in (1.0, 0.5, 0.25, 0.0):
            for harder in (False, True):
                figures = run(Scene(returning, fall, harder), args.histories, args.seed, settings)
                rows.append({"fell": bool(fall), "returning": returning, "harder": harder} | figures)
    if args.json:
        print(json.dumps({"histories": args.histories, "rows": rows}))
        return
    print("really fell | workloads that return | new ones harder | could be judged | called a fall | mean fall seen")
    for row in rows:
        print(
            f"{'yes' if row['fell'] else 'no':11} | {row['returning']:21.0%} | {'yes' if row['harder'] else 'no':15} | "
            f"{row['judged']:15.0%} | {row['called']:13.0%} | {row['fall']:+14.3f}"
        )


if __name__ == "__main__":
    main()
