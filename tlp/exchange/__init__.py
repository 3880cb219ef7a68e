"""Bringing measurements in and taking them out: what `tlp import` and `tlp export` do.

`stages` holds one function per command, `ansor` and `metaschedule` the two foreign formats, `landing` the folder
through which measuring processes hand batches in.
"""

from tlp.exchange.stages import export_folder, export_metaschedule, import_ansor, import_folder, import_metaschedule
