"""One training asks the store and the registry once who the device, the champion and the tasks are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.synthetic import fill_store
from storage import DuckDBStore
from tests.counting import Counting
from tests.fleets import fleet_of
from tests.judging import judge_all
from tests.registries import FakeRegistry
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.pipeline.train import retrain
from tlp.training import plan as planning
from tlp.training.judge.verdict import Verdict

DEVICE, OTHER = "x86-64-v3", "x86-64-v2"


def test_who_is_asked_how_often(tmp_path: Path, quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = DuckDBStore()
    fill_store(inner, networks=("a", "held"), workloads_per_network=3, programs=8, min_samples=8)
    settings = quick.model_copy(update={"train_epochs": 1})
    asked: Counter[str] = Counter()
    for name in ("decide", "choose_tasks"):
        real = getattr(planning, name)

        def counted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            asked[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(planning, name, counted)
    registry = Counting(FakeRegistry(tmp_path / "registry"))
    judge_all(monkeypatch, Verdict.PASSED)
    for _ in range(2):  # without a champion, then from one
        store = Counting(inner)
        registry.calls.clear()
        asked.clear()
        report = retrain(fleet_of(settings, store, registry), TrainRequest(device=DEVICE, force=True))
        assert report["version"] is not None and report["promoted"]
        assert registry.calls["usable"] == 1, "the champion is resolved and loaded once"
        assert registry.calls["register"] == registry.calls["promote_judged"] == registry.calls["champion_version"] == 1
        assert asked == {"decide": 1, "choose_tasks": 1}
        # Before the lock: who is asked for, and which family's lock that is. Under it, all rows and samples: a process
        # that held it may have changed them.
        # What the registered version gives is asked by a process of its own, except here: it reads the rows again.
        assert (store.calls["list_devices"], store.calls["sample_languages"]) == (2, 2), store.calls
        # Beside the request: at the promotion and at the end of the run, for the state. A person may have retired the
        # device meanwhile, a measuring run may have lost it.
        assert (store.calls_of["get_device", DEVICE], store.calls_of["get_device", OTHER]) == (3, 1), store.calls
    assert report["parent"] == "1"
