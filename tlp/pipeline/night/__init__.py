"""The tuning night: which networks are due on which devices, in which order, with how many programs each.

`flows/tune_all.py` shows how it is used; docs/operations.md says what its sentences mean.
"""

from tlp.pipeline.night._due import Decided, Pair, decide, plan
from tlp.pipeline.night._night import Night, NightRegistry
from tlp.pipeline.night._report import Turn
