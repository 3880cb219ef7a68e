"""Figures of the source: lines, modules, lengths of functions, where own modules are imported.

    python bench/source.py [--root FOLDER] [--json]

`tests/test_house.py` holds the limits. A function's length leaves out its docstring; nested functions count in the
one around them, too. An import is lazy if it stands inside a function; an import of another package's private module
(`_x.py`) is private.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tlp", "storage", "flows")
OTHERS = ("tests", "bench")


@dataclass(frozen=True)
class Function:
    """A function: where it starts and its lines, without its docstring and with it."""

    place: str
    name: str
    lines: int
    lines_with_docstring: int


@dataclass(frozen=True)
class Import:
    """An import of a module of ours."""

    place: str
    module: str
    lazy: bool
    private: bool


@dataclass
class Source:
    """What was counted."""

    lines: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)

    @property
    def source_lines(self) -> int:
        """Lines of the packages together."""
        return sum(self.lines[package] for package in PACKAGES)

    def p90(self) -> int:
        """Length that nine of ten functions do not exceed, docstring left out."""
        lengths = sorted(function.lines for function in self.functions)
        return lengths[int(0.9 * len(lengths))]


def measure(root: Path = ROOT) -> Source:
    """Read every module below `root` and count."""
    source = Source()
    for package in (*PACKAGES, *OTHERS):
        files = sorted((root / package).rglob("*.py"))
        source.lines[package] = sum(len(path.read_text().splitlines()) for path in files)
        if package in PACKAGES:
            for path in files:
                _read(source, root, path)
    return source


def _read(source: Source, root: Path, path: Path) -> None:
    text, place = path.read_text(), str(path.relative_to(root))
    source.modules[place] = len(text.splitlines())
    package = place.removesuffix(".py").replace("/", ".").rpartition(".")[0]
    for node, lazy in _walk(ast.parse(text), lazy=False):
        where = f"{place}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            source.functions.append(Function(where, node.name, length - _docstring_lines(node), length))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            module = str(node.module)
            names = [f"{module}.{alias.name}" for alias in node.names]
            private = any(_is_private(name, package) for name in (module, *names))
            source.imports.append(Import(where, module, lazy, private))


def _walk(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, lazy
        yield from _walk(child, lazy=lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _is_private(module: str, package: str) -> bool:
    """Whether a module is `_x` of a package that `package` is not in."""
    parent, _, name = module.rpartition(".")
    path = ROOT / module.replace(".", "/")
    is_module = path.with_suffix(".py").is_file() or path.is_dir()
    return is_module and name.startswith("_") and not (package + ".").startswith(parent + ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = measure(options.root)
    lengths = [function.lines for function in source.functions]
    figures = {
        "source_lines": source.source_lines,
        **{f"{name}_lines": count for name, count in source.lines.items()},
        "tests_per_source_line": round(source.lines["tests"] / source.source_lines, 3),
        "modules": len(source.modules),
        "longest_module": max(source.modules.values()),
        "functions": len(lengths),
        "function_lines_median": statistics.median(lengths),
        "function_lines_p90": source.p90(),
        "function_lines_max": max(lengths),
        "own_imports": len(source.imports),
        "own_imports_lazy": sum(item.lazy for item in source.imports),
        "own_imports_private": sum(item.private for item in source.imports),
    }
    if options.json:
        print(json.dumps(figures | {"longest": asdict(max(source.functions, key=lambda f: f.lines))}))
        return
    table = Table("figure", "value", title=f"source of {options.root}")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
