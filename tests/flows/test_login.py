"""A Prefect server with a password tracks flows with the login of the home; that a login is wrong is said."""

from __future__ import annotations

import httpx
import pytest

from flows import _prefect
from flows.measure import measure
from tlp import services
from tlp.core import secrets
from tlp.core.errors import ServiceError
from tlp.core.requests import MeasureRequest
from tlp.core.settings import get_settings
from tlp.services.prefect import api


@pytest.mark.slow
def test_a_server_of_ones_own_asks_for_the_login(store, monkeypatch):
    settings = get_settings()
    with _prefect.server(settings, print) as url:
        assert url is not None
        bare, login = secrets.split_login(url)
        assert login == settings.login_path.read_text().strip()
        assert httpx.get(f"{bare}/flow_runs/count").status_code == 401
        assert services.prefect_apis(settings) == [url]  # from the environment, as children have it
        report = _prefect.call(measure, MeasureRequest(device="cpu", samples=4))
        assert report["ok"] == 4
        with api(url) as client:
            (run,) = client.post("/flow_runs/filter", json={}).raise_for_status().json()
        assert (run["name"], run["state_name"]) == ("measure cpu", "Completed")

        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "tlp:guessed")
        with pytest.raises(ServiceError, match="refuses the login") as caught:
            _prefect.call(measure, MeasureRequest(device="cpu", samples=4))
        assert "guessed" not in str(caught.value)
