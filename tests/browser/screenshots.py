"""The pictures of docs/operations.md: MLflow's real pages with two versions that were really trained.

python -m tests.browser.screenshots FOLDER        # e.g. docs/images; about a minute
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.synthetic import fill_store
from storage import open_store
from tests.browser import mlflow_pages
from tests.fleets import fleet_of
from tests.tlp.training.steps import run_retrain
from tests.tlp.training.test_retrain import HELD, OPTIONS, Small
from tlp.core.settings import Settings
from tlp.registry import Registry
from tlp.services import temporary_services

MODEL = "mtl-tlp-x86_64"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(
            home=Path(home),
            train_epochs=10,
            train_batch_groups=2,
            train_learning_rate=4e-3,
            torch_threads=1,
            gate_min_tasks=8,  # of a fleet this small
        )
        store = open_store(settings.store_url)
        fill_store(store, holdout=HELD, **OPTIONS)
        registry = Registry(settings, store)
        for _ in range(2):
            result = run_retrain(fleet_of(settings, store, registry), device="x86-64-v3", force=True, strategy=Small())
            print(result.version, result.promoted, result.reason)
        with temporary_services(settings, ["mlflow"]) as view:
            take(str(view.url("mlflow")), view.login, folder)
            registry.hold("x86_64", "a demonstration until Friday")
            take_words(str(view.url("mlflow")), view.login, folder)
            registry.release("x86_64", "over")
            asking = settings.model_copy(update={"promotion": "approval"})
            fleet = fleet_of(asking, store, registry)
            result = run_retrain(fleet, device="x86-64-v3", force=True, strategy=Small())
            print(result.version, result.promoted, result.reason)
            take_approval(str(view.url("mlflow")), view.login, folder, str(result.version))


def take(url: str, login: str | None, folder: Path) -> None:
    with mlflow_pages.open_page(1280, 900, login=login) as page:
        mlflow_pages.open_model(page, url, MODEL)
        mlflow_pages.version_row(page, 2).scroll_into_view_if_needed()
        page.screenshot(path=folder / "mlflow-versions.png")
        dialog = mlflow_pages.open_alias_dialog(page, 1)
        mlflow_pages.type_alias(page, dialog, "champion")
        dialog.get_by_text("is also being used").wait_for()
        page.screenshot(path=folder / "mlflow-alias.png")
        page.goto(f"{url}/#/models/{MODEL}/versions/2")
        page.get_by_text("watermark").first.wait_for()
        page.screenshot(path=folder / "mlflow-version.png")


def take_words(url: str, login: str | None, folder: Path) -> None:
    """A hold on the model's page."""
    with mlflow_pages.open_page(1280, 700, login=login) as page:
        mlflow_pages.open_model(page, url, MODEL)
        page.get_by_text("hold_reason").first.wait_for()
        page.screenshot(path=folder / "mlflow-hold.png")


def take_approval(url: str, login: str | None, folder: Path, version: str) -> None:
    """A version that waits for a person's word, high enough that nothing has to be scrolled."""
    with mlflow_pages.open_page(1280, 2000, login=login) as page:
        mlflow_pages.open_model(page, url, MODEL)
        page.goto(f"{url}/#/models/{MODEL}/versions/{version}")
        row = page.get_by_role("row").filter(has=page.get_by_text("approval", exact=True)).first
        row.wait_for()
        box = row.bounding_box()
        assert box is not None
        page.screenshot(
            path=folder / "mlflow-approval.png",
            clip={"x": 0, "y": max(box["y"] - 350, 0), "width": 1280, "height": 500},
        )


if __name__ == "__main__":
    main()
