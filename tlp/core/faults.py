"""Places at which a process can be made to die, so that a test can look at what the next start makes of it.

    TLP_DIES_AT=registered tlp train      # SIGKILL itself there; nothing is closed, flushed or said

Costs one look at the environment per place. `PLACES` is what a test loops over.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "TLP_DIES_AT"
PLACES: Final = (
    "trained",  # the weights are in memory only
    "kept",  # the candidate is on disk, not judged
    "judged",  # the verdict is on disk, MLflow knows nothing
    "run-opened",  # MLflow has a run without figures
    "logged",  # the run has its figures, the model has no files
    "uploaded",  # the files are there, the version is not
    "registered",  # the version is there, its run is not closed
    "run-closed",  # nobody uses the version
    "noted",  # the store knows the version
    "announced",  # the intent is written, the alias is not moved
    "aliased",  # the alias is moved, nobody recorded it
    "recorded",  # the history has the move, the devices are not said to be serving
    "served",  # all is said and done, the candidate is still kept
)


def reached(place: str) -> None:
    """Die here if the environment says so."""
    assert place in PLACES, place
    if os.environ.get(VARIABLE) == place:
        os.kill(os.getpid(), signal.SIGKILL)
