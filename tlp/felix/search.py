"""`tlp tune --search felix` and `mixed`: the device's Felix model in force, and a gradient search for each task."""

from __future__ import annotations

from collections.abc import Callable

from storage import Device
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.fleet import Fleet
from tlp.core.registry import ResolvedModel
from tlp.felix.cells import FormulaCount
from tlp.felix.config import KIND
from tlp.felix.gradient_search import GradientSearch
from tlp.felix.scorer import FelixModel, load_felix
from tlp.language.encoders import METASCHEDULE
from tlp.measure import Proposer
from tlp.search.adaptation import Adaptation
from tlp.search.opening import Search, Task, Tuning
from tlp.search.providers import InForce
from tlp.training.kinds import model_key


class FelixChampion(InForce[FelixModel]):
    """The champion of the family's Felix models; `versions`: those used, in order."""

    def __init__(self, fleet: Fleet, device: Device, notice: Callable[[str], None]) -> None:
        super().__init__(fleet, model_key(device.family, METASCHEDULE, KIND), device, self._open, notice)
        self._for = device
        self._train = f"tlp train --device {device.name} --model felix"
        self.versions: list[str] = []

    def __call__(self) -> tuple[str, FelixModel]:
        """See `InForce.__call__`."""
        try:
            return super().__call__()
        except RegistryUnavailableError:
            raise
        except (NotFoundError, RegistryError) as exc:
            needed = f"a search by gradient needs Felix's cost model: {exc.message}"
            raise type(exc)(needed, next_command=self._train) from exc

    def _open(self, version: ResolvedModel) -> FelixModel:
        device = self._for
        try:
            model = load_felix(version.checkpoint_dir, device.name, target=device.target, family=device.family)
        except InvalidInputError as exc:  # of another family: no head of it may stand in
            raise ModelFormatError(exc.message, next_command=self._train) from exc
        self.versions.append(str(version.version))
        if model.is_stand_in:
            self._notice(f"Felix's model has no head for {device.name}: that of {model.head} stands in")
        return model


class FelixSearch(Search):
    """Descends through formulas, judged by Felix's model and by the run's.

    Args:
        mixed: breed with the run's model once descending does not pay.
        source: gives the Felix model in force; None: the family's champion (`FelixChampion`).
    """

    def __init__(self, tuning: Tuning, *, mixed: bool, source: Callable[[], FelixModel] | None = None) -> None:
        super().__init__(tuning)
        self._mixed = mixed
        self._champion = FelixChampion(tuning.fleet, tuning.device, tuning.model.notice)
        self._source = source or (lambda: self._champion()[1])
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
        self._model = self._model or self._source()
        return self._model
