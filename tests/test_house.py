"""The limits that keep the house one to live in; `bench/source.py` counts, import-linter checks the floors."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bench import source

ROOT = Path(__file__).resolve().parents[1]
LAZY = (
    "tlp/cli/",  # commands
    "tlp/felix/__init__.py",  # entries of tables
    "tlp/model/kinds.py",
    "tlp/training/kinds.py",
    "tlp/felix/serving.py",  # run by MLflow
    "tlp/model/serving.py",
    "tlp/programs/networks.py",  # the zoo, whose networks are torch modules
)
"""Where own modules may be imported inside a function: what must not pay for torch, TVM or MLflow when it is loaded."""


@cache
def counted() -> source.Source:
    return source.measure(ROOT)


def test_no_module_is_too_long_to_take_in() -> None:
    assert {place: lines for place, lines in counted().modules.items() if lines > 400} == {}


def test_functions_are_short() -> None:
    assert counted().p90() <= 25
    assert [function for function in counted().functions if function.lines > 60] == []


def test_nobody_imports_another_packages_private_module() -> None:
    assert [item for item in counted().imports if item.private] == []


def test_own_modules_are_imported_at_the_top() -> None:
    assert [item for item in counted().imports if item.lazy and not item.place.startswith(LAZY)] == []


def test_every_package_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for package in source.PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
        if len(path.read_text().split('"""')[1]) < 20
    ]
    assert silent == []
