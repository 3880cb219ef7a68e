"""The workloads and design spaces of tests/tlp/programs."""

from tests.tlp.programs.conftest import space, workload

__all__ = ["space", "workload"]
