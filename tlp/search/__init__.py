"""Choosing which programs to measure next. Importing this package imports neither tvm nor torch."""

from tlp.search._base import Observation, Search

__all__ = ["Observation", "Search"]
