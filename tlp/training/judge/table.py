"""The baselines of `tlp evaluate --baseline`: a table. This module is light: `--help` prints its names.

To add one: a `FeatureScorer` or a function that trains one, and a line here. A package above this one adds its own line
when it is imported, as `tlp.felix` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tlp.core.lazy import later

if TYPE_CHECKING:
    from tlp.training.judge.baselines import FeatureScorer
    from tlp.training.judge.evaluate import Scorer


@dataclass(frozen=True)
class BaselineEntry:
    """A baseline of the table; random choice is the one that needs no model.

    Attributes:
        summary: for `--help`, a few words.
        scorer: makes a cost model on per-store features, which is trained on each device's samples.
        train: trains one for a device beside a version: the scorer, and how many programs it was trained on.
        is_promoted: it is the promoted version of the kind of model of this name.
    """

    summary: str
    scorer: Callable[..., FeatureScorer] | None = None
    train: Callable[..., tuple[Scorer, int]] | None = None
    is_promoted: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether evaluating trains it."""
        return self.scorer is not None or self.train is not None


_BASELINES, _COMPARE = "tlp.training.judge.baselines", "tlp.training.judge.compare"
BASELINES: Final[dict[str, BaselineEntry]] = {
    "random": BaselineEntry("expected best of k programs drawn at random"),
    "xgb": BaselineEntry("TVM's XGBModel on per-store features", scorer=later(_BASELINES, "XGBScorer")),
    "mlp": BaselineEntry("TVM's MLPModel (TenSet's) on per-store features", scorer=later(_BASELINES, "MLPScorer")),
    "single": BaselineEntry("the version's network on one device's samples", train=later(_COMPARE, "train_single")),
}
