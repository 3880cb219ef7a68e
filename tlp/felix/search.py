"""`tlp tune --search felix` and `mixed`: the device's Felix model in force, and a gradient search for each task."""

from __future__ import annotations

from collections.abc import Callable

from storage import Device
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.registry import ModelRegistry, ResolvedModel
from tlp.felix.config import KIND
from tlp.felix.formulas import FormulaCount
from tlp.felix.gradient_search import GradientSearch
from tlp.felix.scorer import FelixModel, load_felix
from tlp.language.encoders import METASCHEDULE
from tlp.measure import Proposer
from tlp.search.adaptation import Adaptation
from tlp.search.opening import Search, Task, Tuning
from tlp.training.decision import model_key


class FelixChampion:
    """The champion of the family's Felix models, or the last good version; each version is loaded once.

    Args:
        notice: told what a person should know about the versions used.

    Attributes:
        versions: those used, in order.
    """

    def __init__(self, registry: ModelRegistry, device: Device, notice: Callable[[str], None]) -> None:
        self._registry = registry
        self._device = device
        self._notice = notice
        self._loaded: tuple[int, FelixModel] | None = None
        self.versions: list[str] = []

    def __call__(self) -> FelixModel:
        """The model in force now.

        Raises:
            NotFoundError, RegistryError: there is none to begin with. Once there was one, failing to look again is no
                error.
        """
        key = model_key(self._device.family, METASCHEDULE, KIND)
        try:
            used = self._registry.usable(key, self._device.name, self._load)
        # As in `RegistryProvider.refresh`: a run must survive whatever becomes of its model meanwhile.
        except Exception as exc:
            if self._loaded is None:
                if isinstance(exc, NotFoundError | RegistryError) and not isinstance(exc, RegistryUnavailableError):
                    needed = f"a search by gradient needs Felix's cost model: {exc.message}"
                    raise type(exc)(needed, next_command=self._train) from exc
                raise
            kept = f"the run continues with version {self._loaded[0]}"
            self._notice(f"the registry gave no usable Felix model ({exc}): {kept}")
        else:
            if used.fallback:
                self._notice(used.fallback)
        assert self._loaded is not None
        return self._loaded[1]

    @property
    def _train(self) -> str:
        return f"tlp train --device {self._device.name} --model felix"

    def _load(self, version: ResolvedModel) -> FelixModel:
        device = self._device
        if self._loaded is None or self._loaded[0] != version.version:
            try:
                model = load_felix(version.checkpoint_dir, device.name, target=device.target, family=device.family)
            except InvalidInputError as exc:  # of another family: no head of it may stand in
                raise ModelFormatError(exc.message, next_command=self._train) from exc
            self._loaded = version.version, model
            self.versions.append(str(version.version))
            if model.is_stand_in:
                self._notice(f"Felix's model has no head for {device.name}: that of {model.head} stands in")
        return self._loaded[1]


class FelixSearch(Search):
    """Descends through formulas, judged by Felix's model and by the run's.

    Args:
        mixed: breed with the run's model once descending does not pay.
        source: gives the Felix model in force; None: the family's champion (`FelixChampion`).
    """

    def __init__(self, tuning: Tuning, *, mixed: bool, source: Callable[[], FelixModel] | None = None) -> None:
        super().__init__(tuning)
        self._mixed = mixed
        self._champion = FelixChampion(tuning.fleet.registry, tuning.device, tuning.model.notice)
        self._source = source or self._champion
        self._model: FelixModel | None = None
        self._felix_adaptation = None if tuning.params.frozen else Adaptation()  # another model, other scores
        self._count = FormulaCount()

    def refresh(self) -> None:
        """See `Search.refresh`."""
        self._model = self._source()

    def open(self, task: Task) -> Proposer:
        """See `Search.open`."""
        params = self.tuning.params
        return GradientSearch(
            task.space,
            self._in_force,
            other=task.scores(self.adaptation),
            adaptation=task.learned(self._felix_adaptation),
            degraded=self.tuning.model.degraded,
            count=self._count,
            mixed=self._mixed,
            population=params.population,
            generations=params.generations,
            elite=task.elite,
            seed=task.seed,
        )

    def report(self) -> dict[str, object]:
        """See `Search.report`."""
        return {"formulas": self._count.to_json() | {"model_versions": list(self._champion.versions)}}

    def _in_force(self) -> FelixModel:
        if self._model is None:
            self.refresh()
        assert self._model is not None
        return self._model
