"""The one place where errors become messages and exit codes (the tree is in tlp/core/errors.py)."""

from __future__ import annotations

import errno
import json
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import typer

from tlp.core.errors import InternalError, InvalidInputError, TlpError
from tlp.core.next_steps import next_command
from tlp.core.secrets import mask
from tlp.core.settings import get_settings

INTERRUPTED = 130  # 128 + SIGINT
_GROUPS = {"device", "network", "model", "import", "export"}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}


@dataclass
class Outcome:
    """What the process will exit with."""

    exit_code: int = 0


@contextmanager
def reporting(arguments: Sequence[str], *, as_json: bool) -> Iterator[Outcome]:
    """Turn whatever the body raises into one message on stderr and an exit code.

    Args:
        arguments: the command line, for the help to point to where an error names no next command.
        as_json: errors as JSON objects.
    """
    outcome = Outcome()
    try:
        yield outcome
    except typer.Exit as exc:
        outcome.exit_code = exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _print(_interrupted(arguments), "Interrupted", as_json=as_json)
        outcome.exit_code = INTERRUPTED
    except typer.TyperException as exc:  # a usage error: exit code 2
        command = getattr(getattr(exc, "ctx", None), "command_path", "tlp")
        usage = InvalidInputError(exc.format_message(), next_command=f"{command} --help")
        _print(usage, "UsageError", as_json=as_json)
        outcome.exit_code = exc.exit_code
    except Exception as exc:  # noqa: BLE001  the last handler of the process
        if _on_the_way_out(exc):
            _print(_interrupted(arguments), "Interrupted", as_json=as_json)
            outcome.exit_code = INTERRUPTED
            return
        error = _translated(exc, arguments)
        kind = type(exc if isinstance(error, InternalError) else error).__name__
        _print(error, kind, as_json=as_json)
        outcome.exit_code = error.exit_code


def _on_the_way_out(exc: BaseException | None) -> bool:
    """Whether it was raised while a Ctrl-C or SIGTERM was on its way up: then that is the news."""
    while exc is not None and not isinstance(exc, KeyboardInterrupt):
        exc = exc.__cause__ or exc.__context__
    return exc is not None


def _translated(exc: Exception, arguments: Sequence[str]) -> TlpError:
    """The error as one of our tree, with what to type next; what is none of it is a fault of ours."""
    if isinstance(exc, OSError) and exc.errno in _NOT_WRITABLE:
        text = f"{exc.filename or 'a file'} cannot be written: {exc.strerror}"
        return InvalidInputError(f"{text} (TLP_HOME holds everything this program writes)", next_command="tlp doctor")
    if not isinstance(exc, TlpError) or isinstance(exc, InternalError):
        return _fault_of_ours(exc)
    exc.next_command = next_command(exc)
    if exc.next_command is None:
        words = [word for word in arguments if not word.startswith("-")]
        exc.next_command = " ".join(["tlp", *words[: 2 if words and words[0] in _GROUPS else 1], "--help"])
    return exc


def _interrupted(arguments: Sequence[str]) -> TlpError:
    """What Ctrl-C left, and how to go on: the same command, which for tuning needs `--resume`."""
    words = list(arguments)
    if "tune" in words and not {"--resume", "--due"} & set(words):
        words.append("--resume")
    return InvalidInputError("interrupted; what was stored is kept", next_command=shlex.join(["tlp", *words]))


def _fault_of_ours(exc: Exception) -> InternalError:
    """The traceback goes to a file, the person gets one line."""
    text = "".join(traceback.format_exception(exc))
    try:
        folder = get_settings().logs_dir
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"error-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.log"
        path.write_text(mask(f"{' '.join(sys.argv)}\n{text}"))
        where = f"traceback in {path}"
    except (OSError, TlpError) as log_error:
        sys.stderr.write(mask(text))
        where = f"no log file could be written: {log_error}"
    first_line = (str(exc).splitlines() or [""])[0]
    return InternalError(f"{type(exc).__name__}: {first_line} ({where})", next_command="tlp doctor")


def _print(exc: TlpError, kind: str, *, as_json: bool) -> None:
    if as_json:
        body = {"error": exc.message, "class": kind, "next_command": exc.next_command}
        text = json.dumps(body) + "\n"
    else:
        text = f"error: {exc.message}\n" + (f"try:   {exc.next_command}\n" if exc.next_command else "")
    sys.stderr.write(mask(text))
    sys.stderr.flush()
