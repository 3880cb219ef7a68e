"""What people see of a machine or a model that drifts, and what they can do about it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from storage import Canary, CanaryState, RoundQuality
from tlp.core.home import open_home
from tlp.core.settings import get_settings
from tlp.services import status

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def canary(number: int, state: CanaryState, latency_s: float, reference_s: float | None = 1e-3) -> Canary:
    at = T0 + timedelta(minutes=number)
    return Canary(
        str(number), "cpu", None, at, state, latency_s, None, reference_s, f"the canary is {state}, number {number}"
    )


def test_an_off_canary_is_shown_with_its_numbers_until_a_person_re_bases(tlp, device):
    store = open_home(get_settings())
    store.add_canaries([canary(0, CanaryState.REFERENCE, 1e-3, None), canary(1, CanaryState.STEADY, 1e-3)])
    assert tlp("status", "--json").data["warnings"] == [
        text for text in tlp("status", "--json").data["warnings"] if "canary" not in text
    ]
    store.add_canaries([canary(n, CanaryState.OFF, 2e-3) for n in (2, 3)])
    data = tlp("status", "--json").data
    (text,) = [text for text in data["warnings"] if "canary" in text]
    assert text.startswith("device cpu: the canary is off, number 3; 2 in a row, 0 samples are flagged")
    assert text.endswith("tlp device resume cpu --rebase-canary")
    shown = data["devices"][0]["canary"]
    assert (shown["state"], shown["off"], shown["checks"], shown["off_in_a_row"]) == ("off", 2, 4, 2)
    table = tlp("device", "show", "cpu").out
    assert "off: the canary is off, number 3" in table and "2 of the last 4, 2 in a row" in table
    assert "drift" in tlp("status").out

    state = data["devices"][0]["state"]
    after = tlp(*text.split("tlp ")[1].split(), "--reason", "it has a new cooler", "--json").data
    assert after["state"] == state, "a device at work stays at work"
    assert (after["canary"]["state"], after["canary"]["reason"]) == ("rebase", "it has a new cooler")
    assert store.canary_reference("cpu") is None
    assert not [text for text in tlp("status", "--json").data["warnings"] if "canary" in text]


def test_re_basing_takes_a_device_out_of_quarantine_as_well(tlp, device):
    assert tlp("device", "retire", "cpu").code == 0
    assert tlp("device", "resume", "cpu", "--rebase-canary", "--json").data["state"] == "enrolled"
    assert tlp("device", "resume", "cpu").code == 2


def test_a_version_that_fell_is_a_warning(tlp, device, monkeypatch):
    settings = get_settings()
    store = open_home(settings)

    def rows(count: int, right: float) -> list[RoundQuality]:
        return [
            RoundQuality("r", "cpu", "3", f"w{i % 16}", T0, 0, 9, (30,), (right + i % 3,), 0, {1: 0.9})
            for i in range(count)
        ]

    store.add_round_qualities(rows(16 * settings.live_baseline_rounds, 26.0))
    models = [{"name": "mtl-tlp-x86_64", "champion_version": "3", "versions": 3, "pins": {}, "holds": {}}]
    monkeypatch.setattr(status, "models_at", lambda *_: (models, None))
    assert tlp("status", "--json").data["devices"][0]["live"]["fall"] is None
    store.add_round_qualities(rows(settings.live_window_rounds, 16.0))
    data = tlp("status", "--json").data
    (text,) = [text for text in data["warnings"] if "version 3" in text]
    assert "down by" in text and text.endswith("tlp train --device cpu --dry-run")
    assert data["devices"][0]["live"]["fell"] in text
    assert "of pairs right in the newest of 96 rounds" in " ".join(tlp("device", "show", "cpu").out.split())
