"""MLflow's pages, as a person clicks through them: Chromium driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Response

TIMEOUT_MS = 120_000  # the first page of a cold server on a busy machine
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--no-sandbox",  # root in a container has no other way
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # MLflow's pages are on loopback: nothing is asked of the network
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)


class NoBrowserError(RuntimeError):
    """There is no Chromium on this machine."""


def find_chromium(playwrights_own: str) -> str:
    """The program: TLP_TEST_CHROMIUM, the system's, or the one `playwright install chromium` brought."""
    for path in (os.environ.get("TLP_TEST_CHROMIUM"), *map(shutil.which, _BROWSERS), playwrights_own):
        if path and Path(path).is_file():
            return path
    raise NoBrowserError(
        "no Chromium on this machine, so the roll-back in MLflow's page was not tested. One of these brings it: "
        "apt-get install chromium; .venv/bin/playwright install chromium. "
        "Or leave the test out: pytest -m 'not browser'"
    )


@contextmanager
def open_page(
    width: int = 1400, height: int = 800, *, login: str | None = None, options: Sequence[str] = ()
) -> Iterator[Page]:
    """A page of a browser of its own, where a person typed `login` (user:password). Raises NoBrowserError."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = find_chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=program, args=[*_OPTIONS, *options])
        try:
            user, _, password = (login or "").partition(":")
            typed = {"http_credentials": {"username": user, "password": password}} if login else {}
            page = browser.new_page(viewport={"width": width, "height": height}, **typed)  # type: ignore[arg-type]
            page.set_default_timeout(TIMEOUT_MS)
            yield page
        finally:
            browser.close()


def open_model(page: Page, url: str, model: str) -> None:
    """The page of a registered model, down at its versions."""
    page.goto(f"{url}/#/models/{model}")
    page.get_by_text("New model registry UI").wait_for()
    close = page.locator("text=MLflow Assistant").locator("xpath=ancestor::*[.//button][1]//button").last
    if close.is_visible():
        close.click()
    version_row(page, 1).wait_for()


def version_row(page: Page, version: int) -> Locator:
    """A version's row in the table."""
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=f"Version {version}", exact=True))


def open_alias_dialog(page: Page, version: int) -> Locator:
    """The dialog behind the pencil in a version's column Aliases."""
    cell = version_row(page, version).get_by_role("cell").filter(has=page.locator("button")).last
    cell.get_by_role("button").last.click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    return dialog


def type_alias(page: Page, dialog: Locator, alias: str) -> None:
    """Enter an alias; the dialog says which version loses it."""
    field = dialog.get_by_role("combobox")
    field.fill(alias)  # at once: single keys may be lost on a busy machine
    field.press("Enter")
    dialog.filter(has_text=re.compile(rf"@\s*{alias}\b")).wait_for()  # taken into the field's list


def save(dialog: Locator) -> None:
    """Press the button and wait until MLflow has taken it: the dialog may close before the server has answered."""
    page = dialog.page
    with page.expect_response(_set_alias) as answer:
        dialog.get_by_role("button", name="Save aliases").click()
    assert answer.value.ok, f"MLflow answered {answer.value.status} to {answer.value.request.post_data}"
    dialog.wait_for(state="hidden")


def _set_alias(response: Response) -> bool:
    return response.url.endswith("/registered-models/alias") and response.request.method == "POST"


def move_alias(page: Page, alias: str, version: int) -> None:
    """Put an alias on a version of the model whose page is open."""
    dialog = open_alias_dialog(page, version)
    type_alias(page, dialog, alias)
    save(dialog)


def main() -> None:
    """Print which browser the tests would drive; fails if there is none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        print(find_chromium(playwright.chromium.executable_path))


if __name__ == "__main__":
    main()
