"""TVM targets: what this machine really is, and checking one that a person typed.

Two traps are handled here. TVM's `Target` accepts any `mcpu`, and LLVM then silently compiles for a generic CPU: an
mcpu is checked against LLVM's list. LLVM derives a CPU's features from its model, but a hypervisor may mask some
(AVX-512 as a rule), and programs compiled for such an mcpu die of SIGILL: masked features are switched off in `mattr`.
"""

from __future__ import annotations

import difflib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil

from tlp.core.errors import InvalidInputError
from tlp.programs.tvm import map_tvm_errors

HELP: Final = "tlp device enroll --help"

# LLVM's name → the kernel's in /proc/cpuinfo, where they differ in more than punctuation (`_flag`).
_KERNEL_NAMES: Final[Mapping[str, str]] = {
    **{"sse3": "pni", "bmi": "bmi1", "lzcnt": "abm"},
    **{"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "rdm": "asimdrdm", "lse": "atomics"},  # aarch64
}
# Features a compiler picks instructions by. Others (pku, clwb, …) never appear in a tensor program.
_CODEGEN_PREFIXES: Final = ("avx", "amx", "sve", "sme")
_CODEGEN_FEATURES: Final = frozenset(
    {
        *("sse3", "ssse3", "sse4.1", "sse4.2", "fma", "fma4", "xop", "f16c", "bmi", "bmi2", "tbm", "lzcnt"),
        *("popcnt", "movbe", "gfni", "vaes", "vpclmulqdq"),
        *("neon", "dotprod", "fullfp16", "rdm", "lse", "i8mm", "bf16"),
    }
)
# Features that others are built on come first: switching avx512f off switches off the rest of AVX-512 with it.
_ROOTS: Final = ("sse3", "ssse3", "sse4.1", "sse4.2", "avx", "avx2", "fma", "avx512f", "amx-tile", "neon", "sve")

_ARCHITECTURES: Final[Mapping[str, str]] = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
# What TVM's own tags (`nvidia/…`) say of every GPU; a kernel gets more shared memory than 48 KiB only if it asks.
_CUDA_LIMITS: Final[Mapping[str, int]] = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}
_CPUINFO: Final = Path("/proc/cpuinfo")
_TRIPLES: Final = ("x86_64-linux-gnu", "aarch64-linux-gnu", "riscv64-linux-gnu", "armv7-linux-gnueabihf")


def detect_local_target(num_cores: int | None = None) -> dict[str, Any]:
    """The target of this machine's CPU, by its real `mcpu`.

    Args:
        num_cores: `num-cores` of the target, >= 1; None: the physical cores this process may use.

    Returns:
        `{"kind": "llvm", "mcpu": …, "num-cores": …}`, with `"mattr": ["-avx512f", …]` where LLVM thinks of features
        that /proc/cpuinfo does not have. On systems without /proc/cpuinfo nothing is switched off.

    Raises:
        InvalidInputError: `num_cores` is < 1, or this TVM has no LLVM.
    """
    cores = _default_cores() if num_cores is None else num_cores
    if cores < 1:
        raise InvalidInputError(f"num-cores is {cores}, it must be at least 1", next_command=HELP)
    with map_tvm_errors("this machine's CPU cannot be detected", next_command="tlp doctor"):
        from tvm.target import codegen

        target: dict[str, Any] = {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": cores}
        masked = _masked_features(target, _kernel_flags())
    return {**target, "mattr": masked} if masked else target


def _masked_features(target: Mapping[str, Any], flags: frozenset[str]) -> list[str]:
    """The fewest `-feature` entries after which LLVM's features of `target` are all among the kernel's `flags`."""
    if not flags:
        return []
    masked: list[str] = []
    implied = _llvm_features(target)
    offered = {_flag(flag) for flag in flags}
    missing = [f for f in implied if _is_codegen(f) and _flag(_KERNEL_NAMES.get(f, f)) not in offered]
    for feature in sorted(missing, key=lambda f: (_ROOTS.index(f) if f in _ROOTS else len(_ROOTS), f)):
        if feature in implied:
            masked.append(f"-{feature}")
            implied = _llvm_features({**target, "mattr": masked})
    return masked


def _flag(name: str) -> str:
    """A feature's name without punctuation: LLVM writes `sse4.1`, `amx-tile`, `avx512vnni`, the kernel underscores."""
    return re.sub(r"[-_.]", "", name)


def _is_codegen(feature: str) -> bool:
    return feature in _CODEGEN_FEATURES or feature.startswith(_CODEGEN_PREFIXES)


def _llvm_features(target: Mapping[str, Any]) -> frozenset[str]:
    from tvm.target import Target, codegen

    return frozenset(str(f) for f in codegen.llvm_get_cpu_features(Target(dict(target))))


def _kernel_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Features the kernel offers on every core; empty where there is no such file or list."""
    rows = [frozenset(value.split()) for value in _cpuinfo(path, "flags", "Features")]
    return frozenset.intersection(*rows) if rows else frozenset()


def _cpuinfo(path: Path, *keys: str) -> list[str]:
    """The values of lines that begin with one of the keys; empty where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(keys)]


def _default_cores() -> int:
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    # A container or taskset may allow fewer cores than the machine has.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def normalise_target(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Check a target and fill in what is missing.

    Args:
        value: JSON text, a mapping, an LLVM mcpu (`x86-64-v3`, `znver3`) or a tag of TVM (`nvidia/geforce-rtx-3090`).

    Returns:
        The target as a dict. llvm: `num-cores` defaults to the physical cores of this machine, and an mcpu of another
        architecture gets its `mtriple`. cuda: the limits of a block default to what every GPU of NVIDIA has; without
        them TVM makes no design space.

    Raises:
        InvalidInputError: not JSON, an option TVM does not know, or an mcpu LLVM does not know (near matches named).
    """
    if isinstance(value, str):
        return _from_text(value.strip())
    target = {str(key): _plain(item) for key, item in value.items()}
    if "tag" in target and target["tag"] and "kind" not in target:
        return _from_text(str(target["tag"]))
    if "kind" not in target:
        raise InvalidInputError(
            f"target {json.dumps(target)} has no kind; try {json.dumps({'kind': 'llvm', **target})}", next_command=HELP
        )
    if target["kind"] == "llvm":
        _check_mcpu(target.get("mcpu"), target.get("mtriple"))
        if not target.get("mtriple") and (triple := _triple_of(target.get("mcpu"))):
            target["mtriple"] = triple  # LLVM does not infer it
        target.setdefault("num-cores", _default_cores())
        cores = target["num-cores"]
        if not isinstance(cores, int) or isinstance(cores, bool) or cores < 1:
            raise InvalidInputError(f"num-cores is {cores!r}, it must be an integer >= 1", next_command=HELP)
    if target["kind"] == "cuda":
        target = {**_CUDA_LIMITS, **target}
    with map_tvm_errors(f"TVM refuses target {json.dumps(target, default=str)}", next_command=HELP):
        from tvm.target import Target

        Target(target)
    return target


def _triple_of(mcpu: Any) -> str | None:
    """The triple of an mcpu that is not of this machine's architecture; None: it is, or LLVM does not know it."""
    if mcpu is None or mcpu in _known_cpus(None):
        return None
    return next((triple for triple in _TRIPLES if mcpu in _known_cpus(triple)), None)


def _from_text(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            return normalise_target(json.loads(text))
        except json.JSONDecodeError as exc:
            raise InvalidInputError(f"target {text!r} is not JSON: {exc}", next_command=HELP) from exc
    if " " in text or not text:
        example = '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}'
        raise InvalidInputError(
            f"target {text!r} is neither JSON, a tag nor an mcpu; e.g. {example}", next_command=HELP
        )
    import tvm.target

    if text in {str(tag) for tag in tvm.target.list_tags() or {}}:
        with map_tvm_errors(f"TVM refuses tag {text!r}", next_command=HELP):
            exported = _plain(tvm.target.Target(text).export())
        return normalise_target({k: v for k, v in exported.items() if k != "tag"})
    if text in {str(kind) for kind in tvm.target.Target.list_kinds()}:
        return detect_local_target() if text == "llvm" else normalise_target({"kind": text})
    _check_mcpu(text, None, more=[str(tag) for tag in tvm.target.list_tags() or {}])
    return normalise_target({"kind": "llvm", "mcpu": text})


def _plain(value: Any) -> Any:
    """Target.export() gives TVM's containers."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Iterable):
        return [_plain(v) for v in value]
    return value


def _check_mcpu(mcpu: Any, triple: Any, *, more: Iterable[str] = ()) -> None:
    if mcpu is None:
        return
    if mcpu == "native":
        raise InvalidInputError(
            "mcpu 'native' is not accepted: LLVM would silently compile for a generic CPU; leave the target out "
            "to use the real mcpu of this machine",
            next_command="tlp device enroll NAME",
        )
    known = _known_cpus(str(triple) if triple else None)
    if mcpu in known or (not triple and _triple_of(mcpu)):
        return
    near = difflib.get_close_matches(str(mcpu), [*sorted(known), *more], n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise InvalidInputError(f"LLVM does not know the CPU {mcpu!r}{hint}", next_command=HELP)


@cache
def _known_cpus(triple: str | None) -> frozenset[str]:
    """Names LLVM accepts as mcpu for a triple (None: this machine's); empty if this TVM cannot compile for it."""
    from tvm.target import Target, codegen

    target = Target({"kind": "llvm", "mtriple": triple} if triple else {"kind": "llvm"})
    try:
        return frozenset(str(name) for name in codegen.llvm_get_cpu_archlist(target))
    # An LLVM without that back end raises InternalError.
    except (RuntimeError, ValueError):
        return frozenset()


def family_of(target: Mapping[str, Any]) -> str:
    """The ISA family: `x86_64`, `aarch64`, … for llvm, else the kind (`cuda`, `rocm`, `metal`, …).

    For llvm: the architecture of `mtriple`, else the one whose CPUs include `mcpu`, else this machine's.
    """
    kind = str(target.get("kind", "llvm"))
    if kind != "llvm":
        return kind
    triple = target.get("mtriple") or _triple_of(target.get("mcpu"))
    return _architecture(str(triple).partition("-")[0] if triple else platform.machine())


def _architecture(name: str) -> str:
    return _ARCHITECTURES.get(name.lower(), name.lower())


def host_facts() -> dict[str, Any]:
    """What a device's row records about this machine: CPU name, cores, memory in bytes, system and versions."""
    return {
        "cpu": _cpu_name(),
        "architecture": _architecture(platform.machine()),
        "cores_physical": psutil.cpu_count(logical=False) or 0,
        "cores_logical": psutil.cpu_count() or 0,
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "tvm": version("apache-tvm"),
        "torch": version("torch"),
    }


def _cpu_name() -> str:
    names = _cpuinfo(_CPUINFO, "model name", "Model")
    return next(iter(names), "") or platform.processor() or platform.machine()
