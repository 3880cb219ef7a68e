from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage import Device, DeviceState, DuckDBStore, Sketch, Workload
from storage.interrupts import held_signals
from tests.tuning import FixedScorerProvider
from tlp.core.errors import RegistryUnavailableError
from tlp.core.fleet import Fleet
from tlp.core.registry import ResolvedModel, UsableVersion
from tlp.core.settings import Settings
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.programs.space import DesignSpace
from tlp.search.cost_model import Degraded, Scorer, ScoreScale, TLPCostModel, TraceReader
from tlp.search.providers import InForce, open_provider

FINITE = st.floats(allow_nan=False, allow_infinity=False)
Items = Sequence[tuple[Sketch, tuple[int, ...]]]


def by_sum(items: Items) -> np.ndarray:
    return np.array([-1000.0 + sum(decisions) for _, decisions in items])


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[0], target)


@pytest.fixture(scope="module")
def schedules(space: DesignSpace) -> list[Any]:
    return [candidate.schedule for candidate in space.sample(24, seed=1)]


def test_reader_agrees_with_the_design_space(space: DesignSpace, schedules: list[Any]) -> None:
    reader = TraceReader(space)
    for schedule in schedules + schedules:
        candidate = space.from_schedule(schedule)
        assert reader.read(schedule) == (candidate.sketch, candidate.program.decisions)


@given(st.lists(FINITE, min_size=1, max_size=40), st.lists(FINITE, max_size=40))
@example([0.0, 0.0, 0.0, -7727093674869974.0, -3.40246317898536e16, -4.384981902476638e16], [-1.0])
def test_scale_keeps_order_and_is_positive(first: list[float], later: list[float]) -> None:
    scale = ScoreScale()
    scale(np.array(first))
    values = np.array(first + later)
    scores = scale(values)
    assert np.isfinite(scores).all() and (scores > 0).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(scores[order]) >= 0).all()


def test_scores_follow_the_model(space: DesignSpace, schedules: list[Any]) -> None:
    degraded = Degraded()
    scores = TLPCostModel(space, lambda: (by_sum, "1"), degraded).predict(schedules)
    raw = by_sum([(c.sketch, c.program.decisions) for c in map(space.from_schedule, schedules)])
    assert np.array_equal(np.argsort(raw, kind="stable"), np.argsort(scores, kind="stable"))
    assert degraded.events == 0


def _raises(items: Items) -> np.ndarray:
    raise RuntimeError("weights are gone")


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (_raises, "weights are gone"),
        (lambda items: np.full(len(items), np.nan), "24 of 24 scores are not finite"),
        (lambda items: np.full(len(items), np.inf), "not finite"),
        (lambda items: np.zeros((len(items), 1)), "shape (24, 1)"),
        (lambda items: np.zeros(3), "shape (3,)"),
        (lambda items: None, "shape ()"),
        (lambda items: "nonsense", "could not convert"),
    ],
)
def test_a_bad_model_gives_random_scores_and_is_counted(
    space: DesignSpace, schedules: list[Any], score: Scorer, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    degraded = Degraded()
    model = TLPCostModel(space, lambda: (score, "1"), degraded)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            scores = model.predict(schedules)
            assert scores.shape == (24,) and np.isfinite(scores).all() and (scores >= 0).all()
            assert len(set(scores)) > 20
    assert degraded.events == 3 and degraded.last_reason is not None and reason in degraded.last_reason
    assert len(caplog.records) == 1


def test_an_unreadable_schedule_is_degraded_not_an_error(space: DesignSpace) -> None:
    degraded = Degraded()
    assert TLPCostModel(space, lambda: (by_sum, "1"), degraded).predict([object()]).shape == (1,)
    assert degraded.events == 1


def test_signals_wait_for_the_end_of_the_search(space: DesignSpace, schedules: list[Any]) -> None:
    degraded = Degraded()
    model = TLPCostModel(space, lambda: (by_sum, "1"), degraded)
    seen = []
    with pytest.raises(KeyboardInterrupt), held_signals():
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held")
        model.predict(schedules)  # ends the search early
        seen.append("not reached")
    assert seen == ["held"] and degraded.events == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_registered_model_is_followed_and_survives_the_registry(settings: Settings) -> None:
    class Moving:
        """A champion that moves, then a registry that is away."""

        version = 1

        def usable(self, family: str, device: str, load: Callable[[ResolvedModel], Any]) -> UsableVersion[Any]:
            if not self.version:
                raise RegistryUnavailableError("MLflow does not answer")
            return UsableVersion(self.version, load(ResolvedModel("mtl-tlp-x86_64", self.version, "champion", Path())))

    loaded: list[int] = []

    def load(version: ResolvedModel) -> str:
        loaded.append(version.version)
        return f"scorer {version.version}"

    registry, notices = Moving(), []
    device = Device("a", {}, "x86_64", 1, {}, {}, DeviceState.SERVING, datetime.now(UTC))
    fleet = Fleet(settings, DuckDBStore(), registry)  # type: ignore[arg-type]
    in_force = InForce(fleet, "x86_64", device, load, notices.append)  # type: ignore[arg-type]
    assert [in_force(), in_force()] == [("1", "scorer 1")] * 2
    registry.version = 2
    assert in_force() == ("2", "scorer 2")
    registry.version = 0
    assert in_force() == ("2", "scorer 2") and "continues with version 2" in notices[0]
    assert loaded == [1, 2]
    with pytest.raises(RegistryUnavailableError):
        InForce(fleet, "x86_64", device, load, notices.append)()  # type: ignore[arg-type]


def test_fixed_provider_hands_out_tvm_cost_models(space: DesignSpace) -> None:
    from tvm.s_tir.meta_schedule.cost_model import CostModel

    assert isinstance(FixedScorerProvider(by_sum, "7").cost_model(space), CostModel)


def test_scoring_uses_its_own_number_of_torch_threads() -> None:
    import torch

    from tlp.search.providers import on_threads

    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_open_provider_scores_with_the_registered_checkpoint(
    space: DesignSpace, schedules: list[Any], settings: Settings, tmp_path: Path
) -> None:
    config = TLPConfig(("a",))
    manifest = Manifest("x86_64", config.encoder_version, ("a",), {}, {"a": 1}, 1, (), "joint", None, (0,))
    Checkpoint(config, Vocabulary(), manifest, MTLTLP(config).state_dict()).save(tmp_path / "version")

    class OneVersion:
        def usable(self, family: str, device: str, load: Callable[[ResolvedModel], Scorer]) -> UsableVersion[Scorer]:
            assert (family, device) == ("x86_64", "a")
            return UsableVersion(3, load(ResolvedModel("mtl-tlp-x86_64", 3, "champion", tmp_path / "version")))

    device = Device("a", space.target, "x86_64", 1, {}, {}, DeviceState.SERVING, datetime.now(UTC))
    fleet = Fleet(settings, DuckDBStore(), OneVersion())  # type: ignore[arg-type]
    provider = open_provider("champion", fleet, device)
    assert provider.refresh() == "3"
    scorer = provider.scorer()
    assert scorer is not None
    reader = TraceReader(space)
    scores = scorer([reader.read(schedule) for schedule in schedules])
    assert scores.shape == (24,) and np.isfinite(scores).all() and len(set(scores.tolist())) > 12
    assert [open_provider(ref, fleet, device).ref for ref in ("xgb", "random")] == ["xgb", "random"]
