"""The nights: what devices lack, which networks are due on which devices, how a budget is shared.

`flows/measure_all.py` and `flows/tune_all.py` show how they are used, docs/operations.md says what they say.
"""

from tlp.pipeline.night._due import Decided, Pair, decide, plan
from tlp.pipeline.night._lacking import Lack, lanes, look, split
from tlp.pipeline.night._measuring import DeviceTurn, MeasureNight
from tlp.pipeline.night._night import Night, NightRegistry
from tlp.pipeline.night._report import Turn
