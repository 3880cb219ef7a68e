"""Where a tuning run gets its cost model from: the promoted version, TVM's XGBModel, or no model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from storage import Device
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.registry import ModelRegistry
from tlp.felix.formulas import FormulaCount
from tlp.registry import CHAMPION
from tlp.search.cost_model import Degraded, Scorer, TLPCostModel

if TYPE_CHECKING:
    from tlp.core.registry import Resolved
    from tlp.core.settings import Settings
    from tlp.felix.scorer import FelixModel
    from tlp.programs.space import DesignSpace

log = logging.getLogger(__name__)


class CostModelProvider(ABC):
    """Where a tuning run gets its cost model from.

    Attributes:
        ref: what was asked for (`champion`, a version number, `xgb`, `random`); kept in the run's parameters.
        degraded: scorings of this run that had to do without the model.
        formulas: how far Felix's formulas went, in a search by gradient.
        felix_source: looks up the device's Felix model in force; None: there is none.
        notices: what a person should know about the versions used, each said once.
    """

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self.degraded = Degraded()
        self.formulas = FormulaCount()
        self.felix_source: Callable[[], FelixModel] | None = None
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        """Say something once, in the log and in the run's report."""
        if text not in self.notices:
            log.warning("%s", text)
            self.notices.append(text)

    @abstractmethod
    def refresh(self) -> str:
        """Called before every round: take up whatever is in force now; returns its version as text.

        Raises:
            TlpError: there is no model to begin with. Once there was one, failing to look again is no error.
        """

    @abstractmethod
    def cost_model(self, space: DesignSpace) -> Any:
        """A `meta_schedule.CostModel` for one workload; it follows `refresh` by itself."""

    def scorer(self) -> Scorer | None:
        """The scorer in force, for a search that does not go through TVM; None if there is none of that kind."""
        return None

    def felix(self) -> FelixModel:
        """The device's Felix model in force, for a search by gradient.

        Raises:
            TlpError: there is none to begin with. Once there was one, failing to look again is no error.
        """
        if self.felix_source is None:
            raise NotFoundError("a search by gradient needs Felix's cost model", next_command="tlp train --model felix")
        return self.felix_source()


class FixedScorerProvider(CostModelProvider):
    """One scorer for the whole run, and one Felix model if it is given."""

    def __init__(
        self, scorer: Scorer, version: str, *, ref: str | None = None, seed: int = 0, felix: FelixModel | None = None
    ) -> None:
        super().__init__(ref or version)
        self.felix_source = None if felix is None else lambda: felix
        self._scorer = scorer
        self._version = version
        self._seed = seed

    def refresh(self) -> str:
        """See `CostModelProvider.refresh`."""
        return self._version

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        return TLPCostModel(space, lambda: (self._scorer, self._version), self.degraded, seed=self._seed).tvm_object()

    def scorer(self) -> Scorer:
        """See `CostModelProvider.scorer`."""
        return self._scorer


class RegistryProvider(CostModelProvider):
    """The promoted model, looked up before every round: a roll-back takes effect on the next one.

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
            self.notice(f"the registry gave no usable model ({exc}): going on with version {self._current[1]}")
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

    def refresh(self) -> str:
        """See `CostModelProvider.refresh`."""
        return "xgb"

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

    def refresh(self) -> str:
        """See `CostModelProvider.refresh`."""
        return "random"

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        from tvm.s_tir.meta_schedule.cost_model import RandomModel

        return RandomModel(seed=self._seed + 1)


def open_provider(ref: str, device: Device, settings: Settings, registry: ModelRegistry) -> CostModelProvider:
    """The provider for what a person typed after `--model`.

    Args:
        ref: `xgb`, `random`, `champion` (the device's pin wins), another alias or a version number.
        device: whose head scores.
        settings: torch device and threads, seed.
        registry: asked before every round; not used for `xgb` and `random`, but for Felix's model if it is wanted.

    Nothing is looked up here: `refresh` raises if there is no such version. A champion that was deleted, whose alias
    points nowhere or whose files are gone is stood in for by the last good version (`Registry.usable`), with a notice.
    """
    provider = _provider(ref, device, settings, registry)
    provider.felix_source = _felix_champion(device, registry, provider)
    return provider


def _felix_champion(device: Device, registry: ModelRegistry, provider: CostModelProvider) -> Callable[[], FelixModel]:
    """Looks up the champion of the family's Felix models, or the last good version, loading each once."""
    from tlp.felix.config import KIND
    from tlp.language.encoders import METASCHEDULE
    from tlp.training.decision import model_key

    again = f"tlp train --device {device.name} --model felix"
    loaded: dict[int, FelixModel] = {}

    def load(found: Resolved) -> FelixModel:
        from tlp.felix.scorer import load_felix  # imports torch

        if found.version not in loaded:
            try:
                model = load_felix(found.checkpoint_dir, device.name, target=device.target, family=device.family)
            except InvalidInputError as exc:  # of another family: no head of it may stand in
                raise ModelFormatError(exc.message, next_command=again) from exc
            loaded.clear()
            loaded[found.version] = model
            provider.formulas.versions.append(str(found.version))
            if model.is_stand_in:
                provider.notice(f"Felix's model has no head for {device.name}: that of {model.head} stands in")
        return loaded[found.version]

    def resolve() -> FelixModel:
        try:
            used = registry.usable(model_key(device.family, METASCHEDULE, KIND), device.name, load)
        # As in `RegistryProvider.refresh`: a run must survive whatever becomes of its model meanwhile.
        except Exception as exc:
            if not loaded:
                if isinstance(exc, NotFoundError | RegistryError) and not isinstance(exc, RegistryUnavailableError):
                    needed = f"a search by gradient needs Felix's cost model: {exc.message}"
                    raise type(exc)(needed, next_command=again) from exc
                raise
            kept = f"going on with version {next(iter(loaded))}"
            provider.notice(f"the registry gave no usable Felix model ({exc}): {kept}")
        else:
            if used.fallback:
                provider.notice(used.fallback)
        return next(iter(loaded.values()))

    return resolve


def _provider(ref: str, device: Device, settings: Settings, registry: ModelRegistry) -> CostModelProvider:
    if ref == "xgb":
        return XGBProvider()
    if ref == "random":
        return RandomProvider(settings.seed)

    def load(found: Resolved) -> Scorer:
        from tlp.model.checkpoint import Checkpoint  # imports torch
        from tlp.model.inference import Precision
        from tlp.model.predictor import Predictor
        from tlp.search.scoring import DeviceScorer

        checkpoint = Checkpoint.load(found.checkpoint_dir)

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

    loaded: dict[int, Scorer] = {}  # the version in force, which is looked up before every round

    def load_once(found: Resolved) -> Scorer:
        scorer = loaded.get(found.version) or load(found)
        loaded.clear()
        loaded[found.version] = scorer
        return scorer

    def resolve() -> tuple[str, Callable[[], Scorer]]:
        if ref != CHAMPION:
            found = registry.resolve(device.family, device.name, ref)
            return str(found.version), lambda: load(found)
        used = registry.usable(device.family, device.name, load_once)
        if used.fallback:
            provider.notice(used.fallback)
        return str(used.version), lambda: used.loaded

    provider = RegistryProvider(ref, resolve, seed=settings.seed)
    return provider
