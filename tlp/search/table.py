"""The searches of `tlp tune --search` and the samplers of `tlp measure --sampler`: two tables.

To add one: a module with a `tlp.measure.Proposer`, and a line here. A package above this one adds its own lines when
it is imported, as `tlp.felix` does. This module is light: `--help` prints its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tlp.core.lazy import later

if TYPE_CHECKING:
    from storage import Device
    from tlp.core.fleet import Fleet
    from tlp.measure import Proposer
    from tlp.search.opening import Search, Tuning


@dataclass(frozen=True)
class SearchEntry:
    """A search of the table.

    Attributes:
        summary: for `--help`, a few words.
        open: makes the search for one tuning run.
        lines: what a person should read of the search in a run's report (`tlp tune --json`).
    """

    summary: str
    open: Callable[[Tuning], Search]
    lines: Callable[[Mapping[str, Any]], Sequence[str]] = lambda _report: ()


@dataclass(frozen=True)
class SamplerEntry:
    """A sampler of the table.

    Attributes:
        summary: for `--help`, a few words.
        open: makes the sampler for a device. It raises RegistryUnavailableError if it needs a model and the registry
            does not answer.
    """

    summary: str
    open: Callable[[Fleet, Device], Proposer]


_OPENING, _SAMPLERS = "tlp.search.opening", "tlp.search.samplers"
SEARCHES: Final[dict[str, SearchEntry]] = {
    "evolutionary": SearchEntry("evolution over arrays, judged by the model", later(_OPENING, "EvolutionarySearch")),
    "tvm": SearchEntry("TVM's own evolutionary search", later(_OPENING, "TVMSearch")),
    "random": SearchEntry("random programs", later(_OPENING, "RandomSearch")),
}
SAMPLERS: Final[dict[str, SamplerEntry]] = {
    "random": SamplerEntry("drawn from the design space", later(_SAMPLERS, "open_random")),
    "evolutionary": SamplerEntry("fast ones, as the champion judges", later(_SAMPLERS, "open_evolutionary")),
    "select": SamplerEntry("representative, new, uncertain and promising ones", later(_SAMPLERS, "open_select")),
}
DEFAULT_SAMPLER: Final = "select"
"""Of bootstrap: needs no champion, and is ahead of random choice at 25% of a pool (docs/sampling.md)."""
