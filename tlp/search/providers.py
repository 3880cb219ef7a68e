"""Where a tuning run gets its cost model from: a registered version, TVM's XGBModel, or no model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from storage import Device, Sketch
from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.model.checkpoint import Checkpoint
from tlp.model.inference import Precision
from tlp.model.predictor import Predictor
from tlp.registry import CHAMPION, model_name
from tlp.search.adaptation import Pool
from tlp.search.cost_model import Degraded, Scorer, TLPCostModel
from tlp.training import trial

if TYPE_CHECKING:
    from tlp.core.registry import ResolvedModel
    from tlp.core.settings import Settings
    from tlp.model.inference import Pooled
    from tlp.model.predictor import Predictor
    from tlp.programs.space import DesignSpace

log = logging.getLogger(__name__)
T = TypeVar("T")

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

    def shadow(self) -> tuple[str, Scorer] | None:
        """While the version in force is on trial: the champion's version and scorer, to compare it with."""
        return None


class InForce(Generic[T]):
    """The version of a registered model that a run uses: looked up at each call, loaded once.

    A champion that was deleted, whose alias points nowhere or whose files are gone is replaced by the last good version
    (`Registry.usable`), with a notice. Once a version is loaded the run continues with it, and a notice says so, if the
    registry fails.

    Args:
        key: the family, or the key of another kind of model.
        device: whose pin counts; None: no pin does.
        load: loads a version.
        notice: told what a person should know about the versions used.
        ref: an alias or a version number.
    """

    def __init__(
        self,
        fleet: Fleet,
        key: str,
        device: Device | None,
        load: Callable[[ResolvedModel], T],
        notice: Callable[[str], None],
        ref: str = CHAMPION,
    ) -> None:
        self._registry = fleet.registry
        self._key = key
        self._device = None if device is None else device.name
        self._load = load
        self._notice = notice
        self._ref = ref
        self._loaded: tuple[int, T] | None = None

    def __call__(self) -> tuple[str, T]:
        """The version in force, and what loading it gave.

        Raises:
            NotFoundError, RegistryError: there is none to begin with.
        """
        try:
            if self._ref != CHAMPION:
                self._load_once(self._registry.resolve(self._key, self._device, self._ref))
            elif fallback := self._registry.usable(self._key, self._device, self._load_once).fallback:
                self._notice(fallback)
        # A run must survive a registry that goes away, and a version promoted meanwhile that cannot be loaded.
        except Exception as exc:
            if self._loaded is None:
                raise
            kept = f"the run continues with version {self._loaded[0]}"
            self._notice(f"the registry gave no usable model of {self._key} ({exc}): {kept}")
        assert self._loaded is not None
        return str(self._loaded[0]), self._loaded[1]

    def _load_once(self, version: ResolvedModel) -> T:
        if self._loaded is None or self._loaded[0] != version.version:
            self._loaded = version.version, self._load(version)
        return self._loaded[1]


class RegistryProvider(CostModelProvider):
    """A registered model, looked up before every round: a roll-back takes effect on the next one."""

    def __init__(self, ref: str, fleet: Fleet, device: Device) -> None:
        super().__init__(ref)
        self._seed = fleet.settings.seed
        load = partial(_load_scorer, device=device, settings=fleet.settings)
        self._in_force = InForce(fleet, device.family, device, load, self.notice, ref)
        self._current: tuple[str, Scorer] | None = None
        self._store, self._model, self._device = fleet.store, model_name(device.family), device.name
        self._champion = InForce(fleet, device.family, None, load, self.notice)

    def refresh(self) -> str:
        """See `CostModelProvider.refresh`."""
        self._current = self._in_force()
        return self._current[0]

    def shadow(self) -> tuple[str, Scorer] | None:
        """See `CostModelProvider.shadow`."""
        version = self._now()[1]
        on_trial = (version, self._device) in {(e.version, e.device) for e in trial.running(self._store, self._model)}
        champion = self._champion() if on_trial else None
        return champion if champion is not None and champion[0] != version else None

    def cost_model(self, space: DesignSpace) -> Any:
        """See `CostModelProvider.cost_model`."""
        return TLPCostModel(space, self._now, self.degraded, seed=self._seed).tvm_object()

    def scorer(self) -> Scorer:
        """See `CostModelProvider.scorer`."""
        return self._now()[0]

    def _now(self) -> tuple[Scorer, str]:
        version, scorer = self._current = self._current or self._in_force()
        return scorer, version


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
    """The provider for what a person typed after `--model`. Nothing is looked up here: `refresh` does.

    Args:
        ref: `xgb`, `random`, `champion` (the device's pin wins), another alias or a version number.
        device: whose head scores.
    """
    if ref == "xgb":
        return XGBProvider()
    return RandomProvider(fleet.settings.seed) if ref == "random" else RegistryProvider(ref, fleet, device)


def _load_scorer(version: ResolvedModel, *, device: Device, settings: Settings) -> Scorer:
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


class DeviceScorer:
    """A version's scores for one device: a `Scorer`, whose `pooled` scores thousands of programs of one sketch.

    Args:
        predictor: of the device.
        fast: of the device too, perhaps of lower precision: for `pooled`.
        threads: of torch, for scoring only. A batch takes 0.1 s on one; more wait for each other beside TVM's own.
    """

    def __init__(self, predictor: Predictor, fast: Predictor, threads: int) -> None:
        self._predictor = predictor
        self._fast = fast
        self._threads = threads
        # Only a network that it can compute is offered (`Inference.fits`).
        self.pooled: Pool | None = self._pooled if fast.is_dense else None

    def __call__(self, items: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """Programs of one workload → `(N,)`, higher = faster, in float32."""
        with on_threads(self._threads):
            return self._predictor.score_many(items)

    def _pooled(self, sketch: Sketch, rows: npt.NDArray[np.int64]) -> Pooled:
        with on_threads(self._threads):
            programs = self._fast.pooled(sketch, rows)
        if programs is None:
            raise InvalidInputError("no programs to score")
        return programs


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """`count` torch threads for the body."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
