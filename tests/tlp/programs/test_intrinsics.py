"""Loading TVM's tensor intrinsics, in a process of its own: it can be done once only."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import inspect
looked_up = []
real = inspect.getmodule
def counted(*args):
    looked_up.append(args)
    return real(*args)
inspect.getmodule = counted
from tlp.programs.tvm import load_intrinsics
for kind in ("llvm", "cuda", "llvm", "cuda"):
    load_intrinsics(kind)
assert inspect.getmodule is counted, "put back"
from tvm.s_tir import TensorIntrin
TensorIntrin.get("wmma_sync_16x16x16_f16f16f32")
print(len(looked_up))
"""


def test_every_kind_has_its_intrinsics_and_files_are_looked_up_once() -> None:
    """TVM's parser asks for the modules of whole stacks, 28,000 times in all; each costs a walk over all modules."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 2000
