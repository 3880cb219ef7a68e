"""A password in an address: no command, error, log or file shows it, no process has it on its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlp.core.settings import Settings, get_settings
from tlp.services import ServicesView
from tlp.services.contract import ServiceKind
from tlp.services.table import SERVICES

PASSWORD = "top-secret"
HTTP, POSTGRES = f"http://me:{PASSWORD}@127.0.0.1:9", f"postgresql://me:{PASSWORD}@127.0.0.1:9/tlp"
SHOWN = "http://me:***@127.0.0.1:9"


@pytest.fixture
def elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow and Prefect are somebody else's, and do not answer."""
    monkeypatch.setenv("TLP_MLFLOW_URI", HTTP)
    monkeypatch.setenv("TLP_REGISTRY_PATIENCE_S", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")  # which the registry sets: for this test only
    monkeypatch.setenv("PREFECT_API_URL", f"{HTTP}/api")
    get_settings.cache_clear()


def assert_unknown(home: Path, text: str) -> None:
    assert PASSWORD not in text
    written = [path for path in home.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert written == []


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        *(("status", True), ("status --json", True), ("model list --verbose", True), ("model list --json", True)),
        *(("model history", True), ("train --dry-run", True), ("train --device cpu --json", True)),
        *(("tune --due --dry-run", True), ("device show cpu", False), ("deploy", False)),
    ],
)
@pytest.mark.usefixtures("elsewhere", "device")
def test_commands(tlp, home: Path, command: str, shows: bool) -> None:
    answer = tlp(*command.split())
    text = answer.out + answer.err
    assert (SHOWN in text.replace("\n", "")) is shows, text
    assert_unknown(home, text)


@pytest.mark.usefixtures("elsewhere")
def test_doctor(tlp, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tlp.services import doctor

    slow = {"cpu target", "measuring", "torch"}
    monkeypatch.setattr(doctor, "CHECKS", {key: check for key, check in doctor.CHECKS.items() if key not in slow})
    for options in ((), ("--json",)):
        answer = tlp("doctor", *options)
        assert answer.code == 1
        assert "me:***@" in answer.out
        assert_unknown(home, answer.out + answer.err)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_was_typed_and_what_is_not_acceptable(tlp, home: Path, monkeypatch, options: tuple[str, ...]) -> None:
    tracker = tlp("device", "enroll", "pi", "--tracker", HTTP, "--key", "pi", "--target", "cortex-a72", *options)
    monkeypatch.setenv("TLP_MLFLOW_PORT", HTTP)
    get_settings.cache_clear()
    setting = tlp("status", *options)
    for answer in (tracker, setting):
        assert answer.code != 0
        assert_unknown(home, answer.out + answer.err)
    assert SHOWN in setting.err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_fault_of_ours_with_its_traceback(tlp, home: Path, monkeypatch, options: tuple[str, ...]) -> None:
    def broken(_fleet: object) -> None:
        raise RuntimeError(f"cannot ask {POSTGRES}")

    monkeypatch.setattr("tlp.services.status.collect", broken)
    answer = tlp("status", *options)
    assert answer.code == 70
    assert "postgresql://me:***@" in answer.err
    (log,) = (home / "logs").glob("error-*.log")
    assert "RuntimeError: cannot ask postgresql://me:***@127.0.0.1:9/tlp" in log.read_text()
    assert_unknown(home, answer.out + answer.err)


@pytest.mark.parametrize("kind", SERVICES, ids=lambda kind: kind.name)
def test_no_process_has_it_on_its_command_line(home: Path, kind: ServiceKind) -> None:
    settings = Settings(home=home, mlflow_uri=POSTGRES)
    words, variables = kind.command(settings, 1, ServicesView((), {"prefect": HTTP}))
    assert PASSWORD not in " ".join(words)
    assert variables["TLP_MLFLOW_URI"] == POSTGRES  # which is how it gets there
    if kind.name == "worker":
        assert variables["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
        assert variables["PREFECT_API_AUTH_STRING"] == f"me:{PASSWORD}"


def test_the_answer_of_up_names_no_password(home: Path) -> None:
    view = ServicesView((), {"mlflow": HTTP}, login=f"tlp:{PASSWORD}")
    assert json.loads(json.dumps(view.as_dict())) == {"mlflow": {"up": None, "url": "http://127.0.0.1:9"}}
    assert PASSWORD not in repr(view)
