"""How a command's answer leaves the process: JSON or text on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer
from pydantic_core import to_json

from tlp.core.secrets import mask

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_CLOSED = 141
"""128 + SIGPIPE, what a shell reports for a program whose reader went away."""

WIDTH = 100
"""Columns of an answer that goes to a file or a pipe; on a terminal it is as wide as that is."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else, on stdout.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Reasons in full, with their figures; log what is done on stderr.")
]


@dataclass(frozen=True)
class Output:
    """A command's answer.

    Attributes:
        data: what `--json` prints: JSON types, and what pydantic knows how to write.
        text: builds what a person sees; called only without `--json`, so that rich is imported only then.
        exit_code: of the process.
    """

    data: Any
    text: Callable[[], RenderableType | list[RenderableType]]
    exit_code: int = 0


@dataclass
class _State:
    """The options that every command takes, wherever they stand (`tlp --json status`, `tlp device list --json`)."""

    json: bool = False
    verbose: bool = False

    def add(self, *, json: bool, verbose: bool) -> None:
        """Take up the options given at one word of the command line."""
        self.json |= json
        self.verbose |= verbose
        for name in LOGGERS if self.verbose else ():
            logging.getLogger(name).setLevel(logging.INFO)


LOGGERS = ("tlp", "storage", "flows")
CommandT = TypeVar("CommandT", bound=Callable[..., Output])
state = _State()


def console(stream: TextIO) -> Console:
    """A rich console on that stream."""
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else WIDTH, soft_wrap=False, highlight=False)


def emit(output: Output, *, as_json: bool, stream: TextIO) -> None:
    """Print the answer on `stream`."""
    if as_json:
        # times as ISO 8601, enums by value, NaN and infinities as null, numpy's scalars as numbers
        text = to_json(output.data, indent=2, inf_nan_mode="null", fallback=lambda value: value.item())
        stream.write(mask(text.decode()) + "\n")
    else:
        shown = output.text()
        out = console(stream)
        for part in shown if isinstance(shown, list) else [shown]:
            out.print(mask(part), markup=False) if isinstance(part, str) else out.print(part)
    stream.flush()


@contextmanager
def answers_only() -> Iterator[TextIO]:
    """Keep stdout for the answer: yields a stream to it while everything else that writes to stdout goes to stderr.

    Libraries and child processes print there (MLflow, TVM, LLVM), so the file descriptor is turned as well, where
    there is one (there is none under a test's capture).
    """
    target = sys.stdout
    try:
        is_fd_1 = target.fileno() == 1
    except (io.UnsupportedOperation, AttributeError, ValueError):
        is_fd_1 = False
    if not is_fd_1:
        with redirect_stdout(sys.stderr):
            yield target
        return
    target.flush()
    saved = os.dup(1)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield answer
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        with suppress(BrokenPipeError):  # the reader went away; the write before this has told so already
            answer.close()


def command(app: typer.Typer, name: str, *, example: str) -> Callable[[CommandT], CommandT]:
    """Register a function that returns an `Output`: with `--json`, `--verbose` and an example in its help."""

    def register(function: CommandT) -> CommandT:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for option, annotation in (("json_output", JsonOption), ("verbose", VerboseOption))
        ]

        @functools.wraps(function)
        def run(*args: Any, json_output: bool = False, verbose: bool = False, **kwargs: Any) -> None:
            state.add(json=json_output, verbose=verbose)
            with answers_only() as stream:
                output = function(*args, **kwargs)
                try:
                    emit(output, as_json=state.json, stream=stream)
                except BrokenPipeError:  # `tlp … | head`: the reader has what it wanted
                    raise typer.Exit(PIPE_CLOSED) from None
            if output.exit_code:
                raise typer.Exit(output.exit_code)

        del run.__wrapped__  # typer would read the inner signature
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        paragraphs = [" ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n")]
        app.command(name, help="\n\n".join(paragraphs), short_help=paragraphs[0], epilog=f"Example: {example}")(run)
        return function

    return register


def group(name: str, help_text: str, *, example: str) -> typer.Typer:
    """A command group that takes `--json` and `--verbose` before its subcommand too."""
    app = typer.Typer(name=name, help=help_text, epilog=f"Example: {example}", rich_markup_mode="rich")

    def remember(json_output: JsonOption = False, verbose: VerboseOption = False) -> None:
        state.add(json=json_output, verbose=verbose)

    app.callback()(remember)
    return app
