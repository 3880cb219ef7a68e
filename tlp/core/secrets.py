"""Passwords: the login of a TLP_HOME, addresses that carry a login, and text from which passwords are masked.

A login is `user:password`. Programs carry it in an address (`http://user:password@host`), which httpx understands; what
MLflow and Prefect get is the bare address and the login apart, because their messages repeat the address.
"""

from __future__ import annotations

import logging
import re
import secrets
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from tlp.core import files
from tlp.core.errors import InvalidInputError

USER: Final = "tlp"
_NUM_BYTES: Final = 24
_LOGIN: Final = re.compile(r"[^\s:]+:\S+")
_IN_ADDRESS: Final = re.compile(r"(?<=://)([^\s/?#:@\"'<>]*):[^\s/?#\"'<>]*@")
_AS_FIELD: Final = re.compile(r"(?i)\b([a-z_]*(?:password|passwd|pwd))=[^\s&;\"'<>]+")


# -- the login of a home
def make_login(path: Path) -> str:
    """The login in that file, which is made with a random password if it is not there: mode 0600, once, whole.

    Raises as `read_login`.
    """
    if (login := read_login(path)) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_once(path, f"{USER}:{secrets.token_urlsafe(_NUM_BYTES)}\n")
        login = read_login(path)
    return str(login)


def read_login(path: Path) -> str | None:
    """The login in that file; None without a file. Raises InvalidInputError: it cannot be read or is no login."""
    try:
        login = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"the login in {path} cannot be read: {exc}", next_command=f"ls -l {path}") from exc
    if not _LOGIN.fullmatch(login):
        raise InvalidInputError(f"{path} does not hold one line `user:password`", next_command=f"rm {path} && tlp up")
    return login


# -- addresses
def with_login(address: str, login: str | None) -> str:
    """The address with a login in it, unless it has its own or there is none."""
    if login is None or urlsplit(address).username is not None:
        return address
    user, _, password = login.partition(":")
    return address.replace("://", f"://{quote(user, safe='')}:{quote(password, safe='')}@", 1)


def split_login(address: str) -> tuple[str, str | None]:
    """The address without its login, and the login; None if it has no password."""
    parts = urlsplit(address)
    if parts.password is None:
        return address, None
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return bare, f"{unquote(parts.username or '')}:{unquote(parts.password)}"


# -- text
def mask(text: str) -> str:
    """The text with `***` for every password in an address or after `password=`."""
    return _AS_FIELD.sub(r"\1=***", _IN_ADDRESS.sub(r"\1:***@", text))


def mask_logs() -> None:
    """Mask the messages and tracebacks of all loggers of this process, those of libraries included."""
    made = logging.getLogRecordFactory()
    if getattr(made, "masks", False):
        return

    def masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made(*args, **kwargs)
        with suppress(TypeError, ValueError):  # a message that does not fit its arguments is its handler's business
            if (shown := mask(text := record.getMessage())) != text:
                record.msg, record.args = shown, None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = mask("".join(traceback.format_exception(*record.exc_info)).rstrip())
        return record

    masked.masks = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(masked)


def is_private(path: Path) -> bool:
    """Whether only its owner may read or write the file. Raises OSError."""
    return path.stat().st_mode & 0o077 == 0
