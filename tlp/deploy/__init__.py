"""A network compiled with the best programs known for a device, checked and measured; imports no torch and no tvm."""

from tlp.deploy._best import BestReport, best, compile_network
