"""`tlp import` and `tlp export` as a person and a script meet them: files of other releases, other formats, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"


def test_a_database_of_an_old_release_is_kept_and_the_answer_says_what_cannot_be_built(tlp, device, tmp_path):
    database = str(DATA / "metaschedule" / "llvm-reduce")
    answer = tlp("import", "metaschedule", database, "--device", device, "--json")
    assert answer.code == 0, answer.err
    assert (answer.data["read"], answer.data["stored"], answer.data["skipped"]) == (60, 60, [])
    assert list(answer.data["not_replayable"].values()) == [60]
    again = tlp("import", "metaschedule", database, "--device", device)
    assert again.code == 0, again.err
    assert "60 measurement(s) can be trained on, but not built here" in again.out
    refused = tlp("export", "metaschedule", str(tmp_path / "out"), "--device", device, "--json")
    assert (refused.code, "nothing to export" in refused.error["error"]) == (2, True)


def test_an_ansor_log_of_several_targets_twice(tlp, device):
    log = str(DATA / "ansor")
    first = tlp("import", "ansor", log, "--device", device, "--json").data
    assert (first["read"], first["stored"], first["duplicates"], len(first["skipped"])) == (1161, 1056, 0, 105)
    second = tlp("import", "ansor", log, "--device", device, "--json").data
    assert (second["read"], second["stored"], second["duplicates"]) == (1161, 0, 1056)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"input": ["llvm", "dense", [], {}], "config": {}, "result": [[0.1], 0, 1, 1], "version": 0.2}', "AutoTVM"),
        ("dear diary", "none of its first 1 line(s) is a record"),
    ],
)
def test_what_is_no_log_is_refused_in_one_sentence(tlp, tmp_path, text, reason):
    (tmp_path / "log.json").write_text(text + "\n")
    answer = tlp("import", "ansor", str(tmp_path / "log.json"), "--device", "new", "--target", "x86-64-v3", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert reason in answer.error["error"]
    assert answer.error["next_command"] == "tlp import ansor --help"
    assert tlp("device", "list", "--json").data == []


def test_a_damaged_backup_is_refused_and_leaves_nothing(tlp, device, tmp_path):
    tlp("import", "ansor", str(DATA / "ansor" / "v0.2-matmul-llvm.json"), "--device", device)
    assert tlp("export", "parquet", str(tmp_path / "backup")).code == 0
    path = tmp_path / "backup" / "programs.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    before = tlp("status", "--json").data["runs"]
    answer = tlp("import", "parquet", str(tmp_path / "backup"), "--json")
    assert (answer.code, "is damaged" in answer.error["error"]) == (2, True)
    assert tlp("status", "--json").data["runs"] == before
