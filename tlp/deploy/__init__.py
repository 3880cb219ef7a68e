"""A network compiled with the best programs known for a device, checked and measured as a whole.

Importing this package imports neither torch nor tvm; calling it does.
"""

from tlp.deploy._best import BestReport, best
from tlp.deploy._compile import compile_network

__all__ = ["BestReport", "best", "compile_network"]
