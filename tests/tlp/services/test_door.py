"""The door lets in programs with the login and its own pages, and nobody under another name."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from tlp.core.settings import Settings
from tlp.services import door

LOGIN = ("tlp", "sesame")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("inside")(scope, receive, send)


def ask(
    settings: Settings, path: str = "/", *, login: tuple[str, str] | None = LOGIN, **headers: str
) -> httpx.Response:
    guarded = door.before(application, settings, ":".join(LOGIN))

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5000", auth=login) as client:
            return await client.post(path, headers=headers)

    return asyncio.run(answer())


@pytest.fixture
def local(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def exposed(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, bind_host="0.0.0.0", allowed_hosts="Models.example, other.example")


OWN = ["127.0.0.1:5000", "localhost", "LOCALHOST:80", "127.8.8.8", "[::1]:5000"]
FOREIGN = [
    *("10.evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost", "evil-localhost:5000"),
    *(
        "me@localhost",
        "localhost/evil",
        "localhost:",
        "localhost:x",
        "2130706433",
        "0x7f.1",
        "[::1",
        "::1",
        "",
        "localhost.",
    ),
]


@pytest.mark.parametrize("host", OWN)
def test_own_names(local: Settings, exposed: Settings, host: str) -> None:
    assert ask(local, host=host).text == ask(exposed, host=host).text == "inside"


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names(local: Settings, exposed: Settings, host: str) -> None:
    assert ask(local, host=host).status_code == ask(exposed, host=host).status_code == 403


@pytest.mark.parametrize("host", ["10.0.0.1", "[fd00::1]:80", "models.example", socket.gethostname()])
def test_names_of_a_server_that_others_may_reach(local: Settings, exposed: Settings, host: str) -> None:
    assert ask(exposed, host=host).text == "inside"
    assert ask(local, host=host).status_code == 403


def test_only_pages_of_this_very_server_may_ask(local: Settings) -> None:
    for origin in ("http://127.0.0.1:5000", "https://127.0.0.1:5000"):
        assert ask(local, origin=origin).text == "inside"
    others = ("http://127.0.0.1:5001", "http://127.0.0.1", "http://localhost:5000", "https://evil.example", "null", "")
    for origin in (*others, "http://127.0.0.1:5000.evil.example", "ftp://127.0.0.1:5000"):
        assert ask(local, origin=origin).status_code == 403, origin


def test_without_the_login_there_is_only_health(local: Settings) -> None:
    for login in (None, ("tlp", "Sesame"), ("", "sesame"), ("tlp", "")):
        refused = ask(local, login=login)
        assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        assert ask(local, "/health", login=login).text == "inside"
        assert ask(local, "/health/", login=login).status_code == 401
    assert ask(local, "/health", login=None, host="evil.example").status_code == 403
    assert ask(local, login=None, authorization="Bearer sesame").status_code == 401


def test_no_other_page_puts_it_into_a_frame(local: Settings) -> None:
    assert ask(local).headers["x-frame-options"] == "SAMEORIGIN"


def test_a_websocket_of_a_foreign_page_is_closed_before_it_opens(local: Settings) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/",
        "headers": [(b"host", b"localhost:4200"), (b"origin", b"http://evil.example")],
    }
    asyncio.run(door.before(application, local)(scope, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
