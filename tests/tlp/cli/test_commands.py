"""Commands that work, with the JSON keys scripts rely on."""

from __future__ import annotations

from datetime import datetime

import pytest

DEVICE_KEYS = {
    "name",
    "state",
    "family",
    "samples_ok",
    "samples_failed",
    "min_samples",
    "champion_version",
    "eta_s",
}
IMPORT_KEYS = {"read", "stored", "duplicates", "failed_measurements", "skipped", "workloads"}


def test_status_has_its_keys(tlp, device):
    data = tlp("status", "--json").data
    assert {"devices", "models", "runs", "warnings"} <= data.keys()
    (row,) = data["devices"]
    assert row.keys() >= DEVICE_KEYS
    assert (row["name"], row["state"], row["samples_ok"], row["min_samples"]) == ("cpu", "enrolled", 0, 20)
    assert row["champion_version"] is None
    assert row["eta_s"] is None
    assert any("tlp measure cpu --samples 20" in text for text in data["warnings"])
    assert "cpu" in tlp("status").out


@pytest.mark.parametrize(
    "before", [("--json", "device", "list"), ("device", "--json", "list"), ("device", "list", "--json")]
)
def test_json_may_stand_anywhere(tlp, device, before):
    assert tlp(*before).data[0]["name"] == "cpu"


@pytest.mark.parametrize(
    "command",
    [("-v", "device", "show", "cpu"), ("device", "-v", "show", "cpu"), ("device", "show", "cpu", "--verbose")],
)
def test_a_long_reason_is_one_line_and_in_full_if_asked(tlp, device, command):
    assert tlp("device", "retire", "cpu", "--reason", "word " * 40 + "last").code == 0
    short = tlp("device", "show", "cpu").out
    assert "last" not in short and max(map(len, short.splitlines())) <= 100
    assert "last" in tlp(*command).out


def test_a_device_is_retired_and_resumed(tlp, device):
    assert tlp("device", "retire", "cpu", "--reason", "sold", "--json").data["state"] == "retired"
    refused = tlp("measure", "cpu", "--samples", "1")
    assert refused.code == 2
    assert "tlp device resume cpu" in refused.err
    assert tlp("device", "resume", "cpu", "--json").data["state"] == "enrolled"
    again = tlp("device", "resume", "cpu")
    assert again.code == 2
    detail = tlp("device", "show", "cpu", "--json").data
    assert detail.keys() >= DEVICE_KEYS | {"target", "facts", "endpoint", "history"}
    assert [event["state"] for event in detail["history"]] == ["enrolled", "retired", "enrolled"]
    assert detail["history"][1]["reason"] == "sold"
    assert datetime.fromisoformat(detail["history"][0]["at"]).tzinfo is not None
    assert "sold" in tlp("device", "show", "cpu").out


@pytest.mark.parametrize("meanwhile", [("retired",), ("measuring", "quarantined"), ("quarantined", "retired")])
def test_a_serving_device_resumes_as_serving(tlp, device, home, meanwhile):
    from storage import DeviceState, open_store

    for state in ("serving", *meanwhile):
        open_store(f"duckdb://{home / 'store.duckdb'}").set_device_state("cpu", DeviceState(state), "test")
    assert tlp("device", "resume", "cpu", "--json").data["state"] == "serving"


def test_this_machine_is_enrolled_only_for_a_target_that_runs(tlp):
    answer = tlp("device", "enroll", "here", "--min-samples", "7", "--json")
    assert answer.code == 0, answer.err
    assert answer.data["min_samples"] == 7
    assert answer.data["endpoint"] == {"kind": "local"}
    assert answer.data["target"]["num-cores"] >= 1
    foreign = '{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 1}'
    refused = tlp("device", "enroll", "arm", "--target", foreign)
    assert refused.code == 2
    assert "cannot run code for target" in refused.err
    assert [row["name"] for row in tlp("device", "list", "--json").data] == ["here"]


def test_the_loop_as_far_as_measuring(tlp, device, tmp_path):
    added = tlp("network", "add", "mlp", "--builtin", "mlp", "--holdout", "--json")
    assert added.code == 0, added.err
    assert added.data["holdout"] is True
    assert added.data["tasks"] > 0
    assert tlp("network", "add", "mlp", "--builtin", "mlp").code == 2
    assert "held out" in tlp("network", "list").out
    measured = tlp("measure", "cpu", "--samples", "6", "--json")
    assert measured.code == 0, measured.err
    assert measured.data["ok"] == 6
    status = tlp("status", "--json").data
    assert status["devices"][0]["samples_ok"] == 6
    assert status["devices"][0]["eta_s"] > 0
    assert [(run["kind"], run["state"], run["device"]) for run in status["runs"]] == [("measure", "DONE", "cpu")]

    out = tmp_path / "backup"
    assert tlp("export", "parquet", str(out), "--json").data["rows"]
    assert tlp("export", "parquet", str(out)).code == 2  # it is not empty
    back = tlp("import", "parquet", str(out), "--json").data
    assert back.keys() >= IMPORT_KEYS
    assert (back["read"], back["stored"], back["duplicates"]) == (6, 0, 6)

    database = tmp_path / "database"
    exported = tlp("export", "metaschedule", str(database), "--device", "cpu", "--json")
    assert exported.code == 0, exported.err
    assert exported.data["records"] > 0
    there = tlp("import", "metaschedule", str(database), "--device", "twin", "--target", "x86-64-v2", "--json")
    assert there.code == 0, there.err
    assert there.data["stored"] == exported.data["records"]
    assert tlp("device", "show", "twin", "--json").data["endpoint"] == {"kind": "dataset"}
    refused = tlp("measure", "twin", "--samples", "1")
    assert (refused.code, "no hardware" in refused.err) == (2, True)


def test_an_ansor_log_is_imported(tlp, device):
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2] / "data" / "ansor"
    answer = tlp("import", "ansor", str(folder), "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    assert answer.data.keys() >= IMPORT_KEYS
    assert answer.data["read"] > 0


def test_nothing_but_json_on_stdout(tmp_path):
    """What libraries and child processes print goes to stderr."""
    import json
    import subprocess
    import sys

    program = (
        "import os, subprocess, sys\n"
        "import tlp.services.status\n"
        "def noisy(*_):\n"
        "    print('python'); os.write(1, b'descriptor'); subprocess.run(['echo', 'child'])\n"
        "    return {'devices': [], 'models': [], 'runs': [], 'warnings': []}\n"
        "tlp.services.status.collect = noisy\n"
        "from tlp.cli import main\n"
        "sys.argv = ['tlp', 'status', '--json']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/usr/bin:/bin", "TLP_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["devices"] == []
    assert all(word in done.stderr for word in ("python", "descriptor", "child"))


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tlp, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tlp.services.status.collect", interrupted)
    answer = tlp("status")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines() == ["error: interrupted; what was stored is kept", "try:   tlp status"]
