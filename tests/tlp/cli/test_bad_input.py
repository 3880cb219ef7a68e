"""Bad input is refused in one sentence with the next command to type (one test per kind)."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from tlp.core.settings import get_settings


def refused(answer, code: int, *words: str) -> None:
    assert answer.code == code, answer.err
    assert answer.out == ""
    first, second = [line for line in answer.err.splitlines() if line.startswith(("error:", "try:"))]
    assert first.startswith("error: ")
    assert second.startswith("try:   ")
    assert "Traceback" not in answer.err
    for word in words:
        assert word in first, first


@pytest.mark.parametrize(
    "command",
    [
        "device show nosuch",
        "device retire nosuch",
        "device resume nosuch",
        "measure nosuch --samples 3",
        "train --device nosuch",
        "tune resnet_18 --device nosuch",
        "best resnet_18 --device nosuch",
        "export metaschedule OUT --device nosuch",
    ],
)
def test_unknown_device(tlp, command, tmp_path):
    refused(tlp(*command.replace("OUT", str(tmp_path / "out")).split()), 2, "nosuch")


@pytest.mark.parametrize("command", ["tune nosuch --device cpu", "best nosuch --device cpu"])
def test_unknown_network(tlp, command, device):
    refused(tlp(*command.split()), 2, "nosuch")


@pytest.mark.parametrize("name", ["Bad Name", "-x", "a" * 41, "ü", "a.b"])
@pytest.mark.parametrize("command", ["device enroll {}", "network add {} --builtin resnet_18"])
def test_names_that_do_not_fit_get_a_suggestion(tlp, name, command):
    before, _, after = command.partition("{}")
    refused(tlp(*before.split(), *(["--", name] if name.startswith("-") else [name, *after.split()])), 2)


def test_a_target_llvm_does_not_know(tlp):
    refused(tlp("device", "enroll", "cpu", "--target", "znver44"), 2, "znver44")
    refused(
        tlp("device", "enroll", "cpu", "--target", '{"kind": "llvm", "mcpu": "nosuch", "num-cores": 1}'), 2, "nosuch"
    )
    refused(tlp("device", "enroll", "cpu", "--target", "{not json"), 2)


def test_a_second_device_of_the_same_name(tlp, device):
    refused(tlp("device", "enroll", "cpu"), 2, "'cpu'", "already")


def test_remote_devices(tlp):
    remote = ("device", "enroll", "pi", "--tracker", "127.0.0.1:1")
    refused(tlp(*remote), 2, "go together")
    refused(tlp("device", "enroll", "pi", "--cc", "g++"), 2, "--cc needs both")
    refused(tlp(*remote, "--key", "pi"), 2, "needs its target")
    refused(tlp(*remote, "--key", "pi", "--target", "cortex-a72"), 2, "num-cores")
    target = '{"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4}'
    refused(tlp(*remote, "--key", "pi", "--target", target), 3, "step 1 of 7, tracker reachable", "127.0.0.1:1")


def test_network_sources(tlp):
    refused(tlp("network", "add", "x"), 2, "exactly one")
    refused(tlp("network", "add", "x", "--builtin", "resnet_18", "--onnx", "f"), 2, "exactly one")
    refused(tlp("network", "add", "x", "--builtin", "nosuch"), 2, "nosuch")
    refused(tlp("network", "add", "x", "--torch", "nosuch_module:factory"), 2, "nosuch_module")
    refused(tlp("network", "add", "x", "--onnx", "/nonexistent.onnx"), 2, "/nonexistent.onnx")


def test_an_empty_store(tlp, empty_registry):
    assert tlp("status", "--json").data["devices"] == []
    assert "tlp device enroll" in tlp("device", "list").out
    assert "tlp network add" in tlp("network", "list").out
    refused(tlp("train"), 2)
    refused(tlp("evaluate"), 2)


def test_measuring_without_a_network(tlp, device):
    refused(tlp("measure", "cpu", "--samples", "3"), 2, "no network")


def test_a_sampler_nobody_knows(tlp, device):
    refused(tlp("measure", "cpu", "--samples", "3", "--sampler", "bogus"), 2, "bogus")


@pytest.mark.parametrize("number", ["many", "0", "-3"])
def test_a_quota_that_is_no_number(tlp, device, number):
    refused(tlp("bootstrap", "cpu", "--min-samples", number), 2, number)


@pytest.mark.parametrize("command", ["train", "train --dry-run"])
def test_an_empty_device_name_is_not_every_device(tlp, device, empty_registry, command):
    refused(tlp(*command.split(), "--device", ""), 2, "no device ''")


def test_a_model_that_is_not_there(tlp, empty_registry):
    refused(tlp("model", "show"), 2)
    refused(tlp("model", "promote", "three"), 2, "three")
    refused(tlp("evaluate", "--baseline", "bogus"), 2, "bogus")


def test_a_home_that_cannot_be_written(tlp, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TLP_HOME", str(blocked / "home"))
    get_settings.cache_clear()
    for command in ("status", "device list", "measure x --samples 1"):
        refused(tlp(*command.split()), 2, "TLP_HOME", "cannot be written")


def test_a_full_disk(tlp, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(total=10, used=9, free=1))
    refused(tlp("measure", "x", "--samples", "1"), 2, "full")


def test_a_store_that_is_no_store(tlp, home):
    home.mkdir()
    (home / "store.duckdb").write_bytes(b"not a database, by no means" * 400)
    refused(tlp("status"), 4, "store.duckdb")


@pytest.mark.parametrize(
    ("name", "value"),
    [("TLP_MEASURE_BATCH", "many"), ("TLP_SEED", "99999999999999999999"), ("TLP_TORCH_THREADS", "99999")],
)
def test_settings_that_are_not_acceptable(tlp, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    refused(tlp("status"), 2, name, value)


def test_errors_are_json_with_json(tlp):
    answer = tlp("device", "show", "nosuch", "--json")
    assert answer.code == 2
    assert answer.out == ""
    body = json.loads(answer.err)
    assert body["class"] == "NotFoundError"
    assert re.match("tlp ", body["next_command"])


def test_a_fault_of_ours_leaves_a_traceback_in_a_file(tlp, home, monkeypatch):
    def broken(*_args):
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("tlp.services.status.collect", broken)
    answer = tlp("status")
    assert answer.code == 70
    assert len(answer.err.splitlines()) == 2
    (log,) = (home / "logs").glob("error-*.log")
    assert "Traceback" in log.read_text()
    assert str(log) in answer.err


def test_ctrl_c(tlp, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("tlp.services.status.collect", interrupted)
    assert tlp("status").code == 130
