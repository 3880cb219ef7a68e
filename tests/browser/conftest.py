from __future__ import annotations

import pytest

from tests.browser import mlflow_pages


@pytest.fixture
def browser() -> None:
    """Skips, saying what brings one, where no Chromium is to be had: no network, no rights to install it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    try:
        mlflow_pages.find_chromium(own)
    except mlflow_pages.NoBrowserError as exc:
        pytest.skip(str(exc))
