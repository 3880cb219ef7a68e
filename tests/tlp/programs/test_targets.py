import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tlp.core.errors import InvalidInputError
from tlp.programs import targets

# A kernel that only lives if the CPU has the vectors the target promises: 32 float32 are two AVX-512 registers.
PROBE = """
import json, sys
import numpy as np
import tvm
from tvm import te

n = 64
a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
k = te.reduce_axis((0, n), "k")
c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]).with_attr("global_symbol", "main"))
i, j, k = schedule.get_loops(schedule.get_sblock("C"))
outer, inner = schedule.split(j, [None, 32])
schedule.reorder(i, outer, k, inner)
schedule.vectorize(inner)
library = tvm.compile(schedule.mod, tvm.target.Target(json.loads(sys.argv[1])))
x, y = (np.random.default_rng(s).random((n, n), dtype="float32") for s in (0, 1))
args = [tvm.runtime.tensor(v) for v in (x, y, np.zeros((n, n), "float32"))]
library["main"](*args)
np.testing.assert_allclose(args[2].numpy(), x @ y, rtol=1e-4)
"""


def test_detected_target_compiles_and_runs_here() -> None:
    target = targets.detect_local_target()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(target)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert target["kind"] == "llvm"
    assert target["mcpu"] not in ("", "generic", "native")
    assert 1 <= target["num-cores"] <= (psutil.cpu_count() or 1)
    assert targets.normalise_target(target) == target


def test_num_cores() -> None:
    assert targets.detect_local_target(num_cores=3)["num-cores"] == 3
    with pytest.raises(InvalidInputError, match="num-cores is 0"):
        targets.detect_local_target(num_cores=0)


def test_masked_features_are_switched_off_with_the_fewest_entries() -> None:
    target = {"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu", "num-cores": 2}
    every = {targets._KERNEL_NAMES.get(f, f) for f in targets._llvm_features(target)}
    assert targets._masked_features(target, frozenset(every)) == []
    without = frozenset(flag for flag in every if not flag.startswith("avx512") and flag != "gfni")
    masked = targets._masked_features(target, without)
    assert masked == ["-avx512f", "-gfni"]
    assert not any(f.startswith("avx512") for f in targets._llvm_features({**target, "mattr": masked}))
    # A host of which nothing is known keeps everything.
    assert targets._masked_features(target, frozenset()) == []


def test_kernel_flags_are_those_of_every_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx avx2\n\nprocessor : 1\nflags\t\t: fpu avx\n")
    assert targets._kernel_flags(file) == {"fpu", "avx"}
    assert targets._kernel_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("value", "part", "family"),
    [
        ("x86-64-v3", {"kind": "llvm", "mcpu": "x86-64-v3"}, "x86_64"),
        ('{"kind": "llvm", "mcpu": "znver3", "num-cores": 8}', {"mcpu": "znver3", "num-cores": 8}, "x86_64"),
        ({"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4}, {"mtriple": "aarch64-linux-gnu"}, "aarch64"),
        ({"kind": "llvm", "mtriple": "arm64-apple-macos"}, {}, "aarch64"),
        (
            {"kind": "cuda", "arch": "sm_80"},
            {"arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152},
            "cuda",
        ),
        (
            {"kind": "cuda", "max_shared_memory_per_block": 16384},
            {"max_shared_memory_per_block": 16384, "thread_warp_size": 32},
            "cuda",
        ),
        ("nvidia/geforce-rtx-3090", {"kind": "cuda", "arch": "sm_86"}, "cuda"),
        ({"tag": "nvidia/geforce-rtx-3090"}, {"kind": "cuda"}, "cuda"),
    ],
)
def test_accepted(value: object, part: dict[str, object], family: str) -> None:
    target = targets.normalise_target(value)  # type: ignore[arg-type]
    assert part.items() <= target.items()
    assert targets.family_of(target) == family
    assert json.loads(json.dumps(target)) == target
    assert targets.normalise_target(target) == target
    if target["kind"] == "llvm":
        assert target["num-cores"] >= 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x86-64-v9", r"does not know the CPU 'x86-64-v9'; did you mean .*x86-64-v3"),
        ("znver9", "did you mean .*znver3"),
        ("native", "leave the target out"),
        ('{"kind": "llvm", "mcpu": "native"}', "leave the target out"),
        ('{"kind": "llvm"', "is not JSON"),
        ("llvm -mcpu=znver3", "neither JSON, a tag nor an mcpu"),
        ("", "neither JSON"),
        ("nvidia/geforce-rtx-9999", "did you mean .*nvidia/geforce-rtx-3090"),
        ({"mcpu": "znver3"}, "has no kind"),
        ({"kind": "llvm", "mcpu": "bogus9000"}, "does not know the CPU"),
        ({"kind": "llvm", "bogus": 1}, "Unknown config option 'bogus'"),
        ({"kind": "llvm", "num-cores": 0}, "num-cores is 0"),
        ({"kind": "toaster"}, 'kind "toaster" is not defined'),
    ],
)
def test_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as error:
        targets.normalise_target(value)  # type: ignore[arg-type]
    assert error.value.next_command


def test_host_facts_are_json_and_complete() -> None:
    facts = targets.host_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"]
    assert facts["cores_logical"] >= 1
    assert facts["memory_bytes"] > 0
