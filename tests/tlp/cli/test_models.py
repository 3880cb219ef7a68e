"""Model commands on a real registry, without weights: the registry does not look into a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import copy_template
from tlp.core.registry import Submission
from tlp.core.settings import get_settings
from tlp.registry import Registry

MODEL = "mtl-tlp-x86_64"


@pytest.fixture
def registry(home: Path, mlflow_template: Path, tmp_path: Path) -> Registry:
    """Versions 1 and 2, version 1 promoted."""
    copy_template(mlflow_template, get_settings())
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    found = Registry(get_settings())
    for top1 in (0.5, 0.6):
        found.register(Submission(checkpoint, "x86_64", metrics={"top1": top1, "top5": 0.9}, tags={"gate": "passed"}))
    found.promote("x86_64", 1, reason="passed the gate")
    return found


def test_a_life_of_a_model(tlp, device, registry):
    listed = tlp("model", "list", "--json").data
    assert [(row["version"], row["aliases"], row["top1"]) for row in listed] == [
        ("2", [], 0.6),
        ("1", ["champion"], 0.5),
    ]
    assert tlp("status", "--json").data["devices"][0]["champion_version"] == "1"
    assert tlp("status", "--json").data["models"][0] == {
        "name": MODEL,
        "champion_version": "1",
        "versions": 1,  # no server is up: what trainings and moves recorded
        "pins": {},
        "holds": {},
        "waiting": [],
    }

    moved = tlp("model", "promote", "2", "--reason", "better", "--json").data
    assert (moved[0]["from"], moved[0]["to"], moved[0]["by"]) == ("1", "2", "person")
    assert "already" in tlp("model", "promote", "2").out
    assert tlp("model", "show", "--json").data["version"] == "2"
    assert "top1" in tlp("model", "show", "2").out

    back = tlp("model", "rollback", "--reason", "slower", "--json").data
    assert (back[0]["from"], back[0]["to"]) == ("2", "1")
    assert tlp("model", "show", "2", "--json").data["rejected"] is True
    nothing_left = tlp("model", "rollback")
    assert nothing_left.code == 2
    assert tlp("status", "--json").data["models"][0]["champion_version"] == "1"

    pinned = tlp("model", "promote", "2", "--device", "cpu", "--json").data
    assert pinned[0]["alias"] == "champion-cpu"
    assert tlp("status", "--json").data["devices"][0]["champion_version"] == "2"
    assert [row["pins"] for row in tlp("model", "list", "--json").data] == [["cpu"], []]
    for shown in (("model", "list"), ("model", "show", "2"), ("status",)):
        assert "cpu" in tlp(*shown).out
    assert "cpu=2" in tlp("status").out

    history = tlp("model", "history", "--json").data
    assert [set(row) for row in history] == [{"at", "model", "alias", "from", "to", "by", "reason"}] * 4
    assert [(row["alias"], row["from"], row["to"], row["by"]) for row in history] == [
        ("champion", None, "1", "pipeline"),
        ("champion", "1", "2", "person"),
        ("champion", "2", "1", "person"),
        ("champion-cpu", None, "2", "person"),
    ]
    assert "slower" in tlp("model", "history").out


def test_versions_and_aliases_that_are_not_there(tlp, registry):
    for command in (("show", "9"), ("show", "nosuch"), ("promote", "9"), ("rollback", "--to", "9")):
        answer = tlp("model", *command)
        assert answer.code == 2, command
        assert "try:   tlp" in answer.err
    assert tlp("model", "rollback", "--to", "1").code == 2  # it is there already


def test_status_says_what_is_wrong_with_the_models(tlp, device, registry):
    registry._client.delete_registered_model_alias(MODEL, "champion")
    assert len(tlp("model", "history", "--json").data) == 2  # records what a person did
    waiting = get_settings().pending_dir / "x86_64-abc"
    waiting.mkdir(parents=True)
    said = tlp("status", "--json").data["warnings"]
    assert any(f"{MODEL} has no champion any more" in text for text in said)
    assert any("trained model x86_64-abc is not through the registry yet" in text for text in said)


def test_a_checkpoint_of_another_release_is_refused(tlp, device, registry, home, tmp_path):
    """The registered files are no checkpoint this release can read: exit code 5, one sentence."""
    from storage import open_store

    backup = Path(__file__).resolve().parents[3] / "tlp" / "data" / "starter"
    assert tlp("import", "parquet", str(backup)).code == 0
    assert open_store(f"duckdb://{home / 'store.duckdb'}").watermark() > 0
    answer = tlp("evaluate")
    assert answer.code == 5, answer.err
    assert answer.err.startswith("error: ")
    assert tlp("evaluate", "--model", "nosuch").code == 2


def test_the_registry_is_read_through_a_server_too(tlp, device, registry, monkeypatch):
    """`tlp status` asks REST where MLflow is a server; one that does not answer is a warning, not a failure."""
    monkeypatch.setenv("TLP_MLFLOW_URI", "http://127.0.0.1:9")
    get_settings.cache_clear()
    data = tlp("status", "--json").data
    assert any("registry" in text and "tlp doctor" in text for text in data["warnings"])
    assert data["models"] == [
        {"name": MODEL, "champion_version": "1", "versions": None, "pins": {}, "holds": {}, "waiting": []}
    ]
