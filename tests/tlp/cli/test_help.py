"""The shape of the command line: commands, examples, usage errors, what start-up imports."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlp.cli._app import build
from tlp.model.kinds import KINDS
from tlp.search.table import SAMPLERS, SEARCHES
from tlp.training.judge.table import BASELINES
from tlp.training.learn.table import STRATEGIES

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    "doctor",
    "demo",
    "up",
    "down",
    "deploy",
    "status",
    "bootstrap",
    "measure",
    "train",
    "evaluate",
    "tune",
    "best",
    "device enroll",
    "device list",
    "device show",
    "device retire",
    "device resume",
    "network add",
    "network list",
    "model list",
    "model show",
    "model promote",
    "model rollback",
    "model hold",
    "model release",
    "model history",
    "import ansor",
    "import landing",
    "import metaschedule",
    "import parquet",
    "export metaschedule",
    "export parquet",
)


def leaves() -> Iterator[str]:
    import typer

    root = typer.main.get_command(build())
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from (f"{name} {sub}" for sub in command.commands)
        else:
            yield name


def test_the_commands_are_those_of_the_design():
    assert sorted(leaves()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "", "device", "network", "model", "import", "export"])
def test_every_help_shows_an_example_and_the_json_option(tlp, command):
    answer = tlp(*command.split(), "--help")
    assert answer.code == 0
    assert "Example: tlp" in answer.out
    assert "--json" in answer.out


def test_no_help_text_has_square_brackets():
    """Rich takes `[default: x]` for markup, and it is gone."""
    import typer

    def walk(command):
        yield command
        for sub in getattr(command, "commands", {}).values():
            yield from walk(sub)

    for command in walk(typer.main.get_command(build())):
        texts = [command.help, command.epilog, *(getattr(param, "help", None) for param in command.params)]
        assert not any("[" in (text or "") for text in texts), (command.name, texts)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["device"],
        ["status", "--bogus"],
        ["tune", "x"],
        ["tune", "--device", "x"],
        ["tune", "--due", "x"],
        ["tune", "--due", "--model", "xgb"],
        ["tune", "x", "--device", "y", "--dry-run"],
        ["measure", "x", "--samples", "0"],
        ["device", "show"],
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_type(tlp, arguments):
    answer = tlp(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert "try:   tlp" in answer.err
    as_json = tlp(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.out == ""
    assert set(as_json.error) == {"error", "class", "next_command"}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("measure x --samples 1000000001", "--samples"),
        ("tune x --device y --trials 1000000001", "--trials"),
        ("tune --due --trials 1000000001", "--trials"),
        ("bootstrap x --min-samples -1", "--min-samples"),
        ("bootstrap x --min-samples many", "--min-samples"),
    ],
)
def test_a_request_that_is_not_acceptable_names_the_option(tlp, arguments, option):
    answer = tlp(*arguments.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {option} is ") and "try:   tlp" in answer.err


def test_help_lists_what_the_tables_have(tlp):
    tables = (("tune", SEARCHES), ("measure", SAMPLERS), ("bootstrap", SAMPLERS), ("train", KINDS))
    for command, names in (*tables, ("train", STRATEGIES), ("evaluate", BASELINES)):
        text = tlp(command, "--help").out
        assert all(name in text for name in names) and len(names) > 1


def test_version(tlp):
    from tlp import __version__

    assert tlp("--version").out.strip() == __version__


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--json"], ["device", "list"], ["tune", "--help"]])
def test_start_up_imports_nothing_heavy(tmp_path, arguments):
    program = (
        "import sys\n"
        "from tlp.cli import run\n"
        f"code = run({arguments!r})\n"
        "heavy = {'torch', 'tvm', 'mlflow', 'prefect'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/usr/bin:/bin", "TLP_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_pipe_may_close_early(tmp_path):
    shell = f"{sys.executable} -c 'from tlp.cli import main; main()' status --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell],
        env={"PATH": "/usr/bin:/bin", "TLP_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 141)
    assert done.stderr == b""


def test_commands_in_the_readme_exist():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md yet")
    known = set(COMMANDS)
    lines = re.findall(r"^\$?\s*(?:\S*/)?tlp ([a-z].*)$", readme.read_text(), flags=re.MULTILINE)
    assert lines
    for line in lines:
        words = line.split()
        assert words[0] in known or " ".join(words[:2]) in known, f"tlp {line}"
