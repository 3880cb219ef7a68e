"""What a run learns from its measurements: the process against a plain reference, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, spearmanr

from bench.synthetic import matmul_sketch
from storage import Sketch
from tlp.model.inference import Pooled
from tlp.search.adaptation import MEMORY, Adaptation, Measured, TaskAdaptation
from tlp.search.posterior import PRIOR_DEVIATION, Posterior, Scale, squared_distances

SKETCH = matmul_sketch("w", cache_write=True)
D = 6


def problem(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, hidden vectors and -log2(latency) with a part that the score does not know."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, D))
    scores = 2.0 * hidden[:, 0] + rng.normal(size=count) * 0.1
    return scores, hidden, 10.0 + 0.5 * scores + np.sin(2.0 * hidden[:, 1])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30))
def test_the_mean_is_that_of_the_joint_normal_distribution(seed: int, n: int) -> None:
    scores, hidden, y = problem(n + 5, seed)
    scale = Scale.of(scores, hidden)
    posterior = Posterior.fit(scale, scores[:n], hidden[:n], y[:n])
    # Plain reference: the covariance of all programs written out, conditioned on the first n.
    z = scale.standardised(hidden)
    cov = np.array([[np.exp(-((a - b) ** 2).sum() / (2 * posterior.length)) for b in z] for a in z]) * posterior.share
    noisy = cov[:n, :n] + (1 - posterior.share) * np.eye(n)
    base = posterior.gain * scores + posterior.offset
    expected = base + cov[:, :n] @ np.linalg.solve(noisy, (y - base[:n])[:n] if n == len(y) else y[:n] - base[:n])
    np.testing.assert_allclose(posterior.mean(scores, hidden), expected, atol=1e-6)


def test_the_grid_s_choice_has_the_largest_likelihood() -> None:
    scores, hidden, y = problem(24, 3)
    scale = Scale.of(scores, hidden)
    posterior = Posterior.fit(scale, scores, hidden, y)
    z = scale.standardised(hidden)

    def likelihood(length: float, share: float, variance: float) -> float:
        cov = variance * (share * np.exp(-squared_distances(z, z) / (2 * length)) + (1 - share) * np.eye(24))
        return float(multivariate_normal.logpdf(y, posterior.gain * scores + posterior.offset, cov))

    mine = likelihood(posterior.length, posterior.share, posterior.variance)
    assert all(mine >= likelihood(posterior.length, share, posterior.variance) - 2.0 for share in (0.3, 0.6, 0.9))
    assert mine > likelihood(0.25, 0.3, PRIOR_DEVIATION**2) or posterior.length == 0.25


def test_picks_are_the_exact_greedy_choice() -> None:
    scores, hidden, y = problem(40, 5)
    scale = Scale.of(scores, hidden)
    posterior = Posterior.fit(scale, scores[:12], hidden[:12], y[:12])
    pool = np.arange(12, 40)
    z = scale.standardised(hidden)
    mean = posterior.mean(scores[pool], hidden[pool])

    def deviation(program: int, known: Sequence[int]) -> float:
        cov = posterior.share * np.exp(-squared_distances(z, z) / (2 * posterior.length))
        inner = cov[np.ix_(known, known)] + (1 - posterior.share) * np.eye(len(known))
        cross = cov[program, list(known)]
        return float(np.sqrt(posterior.variance * max(posterior.share - cross @ np.linalg.solve(inner, cross), 0.0)))

    expected: list[int] = []
    for _ in range(6):
        known = [*range(12), *(int(pool[i]) for i in expected)]
        values = [
            -np.inf if i in expected else mean[i] + 1.5 * deviation(int(pool[i]), known) for i in range(len(pool))
        ]
        expected.append(int(np.argmax(values)))
    assert posterior.pick(scores[pool], hidden[pool], 6, 1.5) == expected


def test_near_duplicates_are_not_picked_together_before_anything_was_measured() -> None:
    hidden = np.repeat(np.eye(D), 10, axis=0) * 5 + np.random.default_rng(0).normal(size=(10 * D, D)) * 1e-3
    scores = np.repeat(np.linspace(1.0, 0.9, D), 10)
    prior = Posterior.prior(Scale.of(scores, hidden))
    assert len({i // 10 for i in prior.pick(scores, hidden, D, 30.0)}) == D
    assert {i // 10 for i in prior.pick(scores, hidden, D, 0.0)} == {0}


def test_a_head_that_is_wrong_about_the_order_is_left_out_not_turned_round() -> None:
    scores, hidden, _ = problem(30, 1)
    posterior = Posterior.fit(Scale.of(scores, hidden), scores, hidden, -3.0 * scores)
    assert posterior.gain == 0.0 and np.isfinite(posterior.mean(scores, hidden)).all()


class Model:
    """Scores that know one of two things that matter."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = np.random.default_rng(seed).normal(size=(SKETCH.decision_width, D))
        self.calls = 0

    def __call__(self, sketch: Sketch, rows: np.ndarray) -> Pooled:
        self.calls += 1
        hidden = (np.log2(np.abs(rows) + 1.0) @ self.weights).astype(np.float32)
        return Pooled(hidden[:, 0], hidden)


def rows(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 2 ** rng.integers(0, 6, size=(count, SKETCH.decision_width))


def latency_s(model: Model, programs: np.ndarray) -> np.ndarray:
    hidden = model(SKETCH, programs).hidden
    seconds: np.ndarray = 2.0 ** (-0.2 * hidden[:, 0] + 0.3 * hidden[:, 1] - 10.0)
    return seconds


def measured(model: Model, programs: np.ndarray) -> list[Measured]:
    return [
        Measured(SKETCH, tuple(row), float(latency))
        for row, latency in zip(programs.tolist(), latency_s(model, programs), strict=True)
    ]


def adapted(model: Model, count: int) -> TaskAdaptation:
    task = Adaptation().task("w")
    task.prepare([(SKETCH, rows(200, 9))])
    task.observe(measured(model, rows(count, 1)))
    return task


def test_measurements_improve_the_order_of_programs_that_were_not_measured() -> None:
    model, new = Model(), rows(300, 2)
    truth = -np.log2(latency_s(model, new))

    def order(task: TaskAdaptation) -> float:
        return float(spearmanr(task.scores(model, "1", SKETCH, new), truth)[0])

    before, after = order(adapted(model, 0)), order(adapted(model, 40))
    assert after > before + 0.1


def test_another_version_is_learned_anew_from_the_same_measurements() -> None:
    first, second, new = Model(0), Model(1), rows(50, 3)
    task = adapted(first, 20)
    before = task.scores(first, "1", SKETCH, new)
    other = task.scores(second, "2", SKETCH, new)
    fresh = TaskAdaptation()
    fresh.prepare([(SKETCH, rows(200, 9))])
    fresh.observe(measured(first, rows(20, 1)))
    np.testing.assert_array_equal(other, fresh.scores(second, "2", SKETCH, new))
    assert not np.allclose(before, other)
    np.testing.assert_array_equal(before, task.scores(first, "1", SKETCH, new))


def test_what_was_learned_is_kept_between_scores() -> None:
    model = Model()
    task = adapted(model, 20)
    task.scores(model, "1", SKETCH, rows(5, 4))
    before = model.calls
    task.scores(model, "1", SKETCH, rows(5, 5))
    assert model.calls == before + 1


def test_a_long_run_is_learned_from_within_bounds_and_keeps_its_fastest() -> None:
    model = Model()
    task = adapted(model, 0)
    programs = measured(model, rows(3 * MEMORY, 6))
    for start in range(0, len(programs), 50):
        task.observe(programs[start : start + 50])
    kept = task._measured
    assert len(kept) <= MEMORY
    assert min(kept, key=lambda program: program.latency_s) == min(programs, key=lambda program: program.latency_s)
    assert programs[-1] in kept


def test_tasks_tell_each_other_what_a_score_is_worth() -> None:
    model, all_tasks = Model(), Adaptation()
    for name in ("w", "v"):
        all_tasks.task(name).prepare([(SKETCH, rows(200, 9))])
    first = all_tasks.task("w")
    first.observe(measured(model, rows(40, 1)))
    first.scores(model, "1", SKETCH, rows(3, 2))
    assert first.gain == pytest.approx(0.2, rel=0.5)
    scores = model(SKETCH, rows(50, 3)).scores
    learned = all_tasks.task("v").scores(model, "1", SKETCH, rows(50, 3))
    np.testing.assert_allclose(learned, (first.gain or 0.0) * scores, rtol=1e-5)
