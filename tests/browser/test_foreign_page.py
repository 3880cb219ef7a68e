"""A page of another server, in a browser whose person is logged in: it moves no alias and creates no deployment."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser import mlflow_pages
from tlp.core.settings import Settings
from tlp.registry.mlflow import open_client
from tlp.services import ServicesView, temporary_services
from tlp.services.prefect import api

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("browser")]
POST = """async ([url, body, mode, headers]) => {
    try {
        const answer = await fetch(url, {method: "POST", credentials: "include", mode, headers, body});
        return answer.status;
    } catch (error) { return String(error); }
}"""


@contextmanager
def another_server() -> Iterator[str]:
    """A page on another port of loopback, which is the same site to a browser."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>games</title>")

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def move_alias(page: Page, view: ServicesView, version: int, mode: str) -> Any:
    """What MLflow's page sends; the browser adds the login."""
    url = f"{view.url('mlflow')}/ajax-api/2.0/mlflow/registered-models/alias"
    body = json.dumps({"name": "model", "alias": "champion", "version": str(version)})
    kind = "text/plain" if mode == "no-cors" else "application/json"  # a plain text is sent without asking first
    return page.evaluate(POST, [url, body, mode, {"Content-Type": kind}])


def create_flow(page: Page, view: ServicesView, headers: dict[str, str], mode: str) -> Any:
    """The first step to a deployment, which needs its flow; with the login and a token, as if it knew them."""
    url = f"{view.url('prefect')}/api/flows/"
    return page.evaluate(POST, [url, json.dumps({"name": f"made-{mode}"}), mode, headers])


def test_only_own_pages_may_act(mlflow_settings: Settings) -> None:
    client = open_client(mlflow_settings)
    client.create_registered_model("model")
    for _ in range(2):
        client.create_model_version("model", source=mlflow_settings.mlflow_dir.as_uri())
    client.set_registered_model_alias("model", "champion", "2")
    mapped = "--host-resolver-rules=MAP 10.evil.example 127.0.0.1"
    with (
        temporary_services(mlflow_settings, ["mlflow", "prefect"]) as view,
        mlflow_pages.open_page(login=view.login, options=[mapped]) as page,
        another_server() as foreign,
        api(str(view.prefect_api_url)) as prefect,
    ):
        login = {"Authorization": f"Basic {base64.b64encode(str(view.login).encode()).decode()}"}
        tokens = {key: prefect.headers[key] for key in ("Prefect-Csrf-Client", "Prefect-Csrf-Token")}
        known = {"Content-Type": "application/json", **login, **tokens}
        page.goto(str(view.url("mlflow")))  # logged in
        page.goto(foreign)
        for mode in ("cors", "no-cors"):
            assert move_alias(page, view, 1, mode) in ("TypeError: Failed to fetch", 0)
            assert create_flow(page, view, known, mode) in ("TypeError: Failed to fetch", 0)
        assert client.get_registered_model("model").aliases == {"champion": 2}
        assert prefect.post("/flows/filter", json={}).json() == []

        # a name that leads to this machine is another server's all the same
        for name, path in (("mlflow", "version"), ("prefect", "ui-settings")):
            url = f"http://10.evil.example:{urlsplit(str(view.url(name))).port}/{path}"
            answer = page.goto(url)
            assert answer is not None
            assert answer.status == httpx.codes.FORBIDDEN

        # the very same requests, from the servers' own pages
        page.goto(str(view.url("mlflow")))
        assert move_alias(page, view, 1, "cors") == httpx.codes.OK
        assert client.get_registered_model("model").aliases == {"champion": 1}
        page.goto(str(view.url("prefect")))
        assert create_flow(page, view, known, "cors") == httpx.codes.CREATED
