"""The network and the device of tests/tlp/search."""

from tests.tlp.search.conftest import small, store, target, workloads

__all__ = ["small", "store", "target", "workloads"]
