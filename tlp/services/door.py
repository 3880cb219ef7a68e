"""What stands before the servers of `tlp up`: it looks at who asks before their applications do.

uvicorn runs the factories, `python -m uvicorn --factory tlp.services.door:mlflow_app`. Three questions:

- **Host.** A name of this machine, or an address in digits: a page whose name was pointed at this machine (DNS
  rebinding) comes with its own. MLflow's patterns take `10.evil.example` for a private address.
- **Origin**, which a browser adds when a page asks: this very server. MLflow lets every port of localhost in and gives
  it the login that the browser remembers; Prefect lets everybody in.
- **Authorization.** MLflow's own accounts (`--app-name basic-auth`) are a second database and a slow hash per request
  for one user. Prefect asks for its password itself, and for tokens against forged requests.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Collection
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlp.core import secrets
from tlp.core.settings import Settings, get_settings
from tlp.services.contract import LOOPBACK

_HEALTH: Final = "/health"
_HOST: Final = re.compile(r"(?:\[(?P<digits>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]+)?")
_SCHEMES: Final = ("http", "https")  # the latter through somebody's proxy
_POLICY_VIOLATION: Final = 1008  # of a websocket


class Door:
    """An ASGI application that lets through to another what comes from its own pages and from programs.

    `names`: host names of this machine; `only_loopback`: no other addresses; `login`: what to ask for, if at all.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], *, only_loopback: bool, login: str | None = None) -> None:
        self._app, self._names, self._only_loopback = app, frozenset(names), only_loopback
        self._wanted = None if login is None else b"Basic " + base64.b64encode(login.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, _unframed(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return PlainTextResponse("not a name of this server (TLP_ALLOWED_HOSTS)", HTTPStatus.FORBIDDEN)
        if any(origin not in [f"{scheme}://{hosts[0]}" for scheme in _SCHEMES] for origin in origins):
            return PlainTextResponse("pages of other servers may not ask this one", HTTPStatus.FORBIDDEN)
        given = headers.get("authorization", "").encode()
        if self._wanted is None or scope["path"] == _HEALTH or hmac.compare_digest(given, self._wanted):
            return None
        challenge = {"WWW-Authenticate": 'Basic realm="tlp", charset="UTF-8"'}
        return PlainTextResponse("user and password are in TLP_HOME/login", HTTPStatus.UNAUTHORIZED, challenge)

    def _is_ours(self, host: str) -> bool:
        named = _HOST.fullmatch(host)
        name = "" if named is None else (named["digits"] or named["name"]).lower()
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._only_loopback


def _unframed(send: Send) -> Send:
    """Answers that no other page can put into a frame, to have it clicked unseen."""

    async def send_unframed(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Frame-Options"] = "SAMEORIGIN"
        await send(message)

    return send_unframed


def before(app: ASGIApp, settings: Settings, login: str | None = None) -> Door:
    """The door of a server that listens on `bind_host`."""
    allowed = {name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip()}
    local = settings.bind_host in LOOPBACK
    own = () if local else (settings.bind_host, socket.gethostname(), socket.getfqdn())
    return Door(app, {"localhost", *allowed, *(name.lower() for name in own)}, only_loopback=local, login=login)


# -- factories: the server's process reads the login itself, so that it stands in no environment and no command line
def prefect_app() -> Door:
    """Prefect's server, as `prefect server start --background` starts it."""
    secrets.mask_logs()
    settings = get_settings()
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = secrets.make_login(settings.login_path)
    from prefect.server.api.server import create_app

    return before(create_app(final=True), settings)


def mlflow_app() -> Door:
    """MLflow's server, as `mlflow server` starts it, without that parent process: 280 MB that only wait."""
    secrets.mask_logs()
    settings = get_settings()
    os.environ["MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE"] = "true"  # the door is stricter
    from mlflow.server import constants, handlers
    from mlflow.store.tracking import DEFAULT_ARTIFACTS_URI

    uri = settings.mlflow_tracking_uri
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = uri
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = DEFAULT_ARTIFACTS_URI
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = str(settings.mlflow_dir / "artifacts")
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    handlers.initialize_backend_stores(uri, uri, DEFAULT_ARTIFACTS_URI)  # a database that cannot be used ends it now
    from mlflow.server.fastapi_app import app

    return before(app, settings, secrets.make_login(settings.login_path))
