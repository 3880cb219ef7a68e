"""Where a tuning run gets its cost model from: a registered version, TVM's XGBModel, or no model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from storage import Device
from tlp.core.fleet import Fleet
from tlp.registry import CHAMPION
from tlp.search.cost_model import Degraded, Scorer, TLPCostModel

if TYPE_CHECKING:
    from tlp.core.registry import ResolvedModel
    from tlp.core.settings import Settings
    from tlp.programs.space import DesignSpace

log = logging.getLogger(__name__)


WITHOUT_REGISTRY: Final = ("xgb", "random")
"""What a person may type after `--model` that is no registered version."""


class CostModelProvider(ABC):
    """Where a tuning run gets its cost model from.

    Attributes:
        ref: what was asked for (`champion`, a version number, `xgb`, `random`); kept in the run's parameters.
        degraded: scorings of this run that had to do without the model.
        notices: what a person should know about the versions used, each said once.
    """

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self.degraded = Degraded()
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        """Say something once, in the log and in the run's report."""
        if text not in self.notices:
            log.warning("%s", text)
            self.notices.append(text)

    def refresh(self) -> str:
        """Called before every round: take up the model in force now; returns its version as text.

        Raises:
            TlpError: there is no model to begin with. Once there was one, failing to look again is no error.
        """
        return self.ref

    @abstractmethod
    def cost_model(self, space: DesignSpace) -> Any:
        """A `meta_schedule.CostModel` for one workload; it follows `refresh` by itself."""

    def scorer(self) -> Scorer | None:
        """The scorer in force, for a search that does not go through TVM; None if there is none of that kind."""
        return None


class RegistryProvider(CostModelProvider):
    """A registered model, looked up before every round: a roll-back takes effect on the next one.

    Args:
        ref: `champion`, another alias or a version number.
        resolve: what `ref` points at now: its version and a function that loads the scorer. Called once per round.
    """

    def __init__(self, ref: str, resolve: Callable[[], tuple[str, Callable[[], Scorer]]], *, seed: int = 0) -> None:
        super().__init__(ref)
        self._resolve = resolve
        self._seed = seed
        self._current: tuple[Scorer, str] | None = None

    def refresh(self) -> str:
        """See `CostModelProvider.refresh`."""
        try:
            version, load = self._resolve()
            if self._current is None or self._current[1] != version:
                self._current = load(), version
        # A run must survive a registry that goes away, and a version promoted meanwhile that cannot be loaded.
        except Exception as exc:
            if self._current is None:
                raise
            self.notice(f"the registry gave no usable model ({exc}): the run continues with version {self._current[1]}")
        return self._current[1]

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        return TLPCostModel(space, self._in_force, self.degraded, seed=self._seed).tvm_object()

    def scorer(self) -> Scorer:
        """See `CostModelProvider.scorer`."""
        return self._in_force()[0]

    def _in_force(self) -> tuple[Scorer, str]:
        if self._current is None:
            self.refresh()
        assert self._current is not None
        return self._current


class XGBProvider(CostModelProvider):
    """TVM's XGBModel, one for all workloads, trained online on what this run measures: the baseline."""

    def __init__(self) -> None:
        super().__init__("xgb")
        self._model: Any = None

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        if self._model is None:
            from tvm.s_tir.meta_schedule.cost_model import XGBModel

            self._model = XGBModel()
        return self._model


class RandomProvider(CostModelProvider):
    """No model: random scores."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("random")
        self._seed = seed

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        from tvm.s_tir.meta_schedule.cost_model import RandomModel

        return RandomModel(seed=self._seed + 1)


def open_provider(ref: str, fleet: Fleet, device: Device) -> CostModelProvider:
    """The provider for what a person typed after `--model`.

    Nothing is looked up here: `refresh` raises if there is no such version. A champion that was deleted, whose alias
    points nowhere or whose files are gone is replaced by the last good version (`Registry.usable`), with a notice.

    Args:
        ref: `xgb`, `random`, `champion` (the device's pin wins), another alias or a version number.
        device: whose head scores.
    """
    if ref == "xgb":
        return XGBProvider()
    if ref == "random":
        return RandomProvider(fleet.settings.seed)
    loaded: dict[int, Scorer] = {}  # the version in force, which is looked up before every round

    def load_once(version: ResolvedModel) -> Scorer:
        scorer = loaded.get(version.version) or _load_scorer(version, device, fleet.settings)
        loaded.clear()
        loaded[version.version] = scorer
        return scorer

    def resolve() -> tuple[str, Callable[[], Scorer]]:
        if ref != CHAMPION:
            version = fleet.registry.resolve(device.family, device.name, ref)
            return str(version.version), lambda: _load_scorer(version, device, fleet.settings)
        used = fleet.registry.usable(device.family, device.name, load_once)
        if used.fallback:
            provider.notice(used.fallback)
        return str(used.version), lambda: used.loaded

    provider = RegistryProvider(ref, resolve, seed=fleet.settings.seed)
    return provider


def _load_scorer(version: ResolvedModel, device: Device, settings: Settings) -> Scorer:
    from tlp.model.checkpoint import Checkpoint  # imports torch
    from tlp.model.inference import Precision
    from tlp.model.predictor import Predictor
    from tlp.search.scoring import DeviceScorer

    checkpoint = Checkpoint.load(version.checkpoint_dir)

    def predictor(precision: Precision) -> Predictor:
        return Predictor(
            checkpoint,
            device.name,
            target=device.target,
            family=device.family,
            torch_device=settings.torch_device,
            precision=precision,
        )

    exact, wanted = predictor(Precision.FLOAT32), Precision(settings.tune_precision)
    fast = exact if wanted.dtype() == Precision.FLOAT32.dtype() else predictor(wanted)
    return DeviceScorer(exact, fast, settings.torch_threads or 1)
