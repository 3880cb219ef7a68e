"""Reading auto_scheduler logs, line by line and file by file."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from storage import MeasurementState, Sketch
from tests.references.ansor_encoding import to_steps
from tlp.core.errors import InvalidInputError
from tlp.exchange.ansor import log
from tlp.exchange.ansor.log import (
    foreign_format,
    log_files,
    looks_like_a_record,
    make_workload,
    numbered_lines,
    open_log,
    parse_record,
    parse_target,
    target_conflict,
)
from tlp.language.ansor import LANGUAGE, parse_sketch_text

DATA = Path(__file__).parents[2] / "data" / "ansor"
STEPS: list[Any] = [["SP", 2, 0, 128, [4, 2, 4], 1], ["AN", 2, 9, 2], ["PR", 2, 0, "auto_unroll_max_step$16"]]


def line(
    task: list[Any] | None = None,
    steps: Any = None,
    result: Any = None,
    version: Any = "v0.6",
) -> bytes:
    """A record, well formed where nothing else is asked for."""
    row = {
        "i": [
            task if task is not None else ['["matmul", 128, 128]', "llvm -keys=cpu ", [8] * 8, "", 1, []],
            [[], STEPS if steps is None else steps],
        ],
        "r": result if result is not None else [[0.1, 0.3, 0.2], 0, 1.5, 1600000000],
        "v": version,
    }
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("name", "count", "kinds"),
    [
        ("v0.1-one-record.json", 1, {"cuda"}),
        ("v0.2-matmul-llvm.json", 1, {"llvm"}),
        ("v0.3-resnet18-cuda.json", 24, {"cuda"}),
        ("v0.3-resnet50-llvm.json", 29, {"llvm"}),
        ("v0.5-resnet50-llvm.json", 26, {"llvm"}),
        ("v0.6-conv2d-1k-x86.json.gz", 1000, {"llvm"}),
        ("v0.6-conv2d-rtx3080.log", 56, {"cuda"}),
        ("v0.6-resnet18-cuda.json", 24, {"cuda"}),
    ],
)
def test_every_real_record_is_read(name: str, count: int, kinds: set[str]) -> None:
    with open_log(DATA / name) as stream:
        lines = [text for _, text in numbered_lines(stream)]
    records = [parse_record(text) for text in lines]
    assert len(records) == count
    assert {parse_target(r.target)["kind"] for r in records} == kinds
    for text, record in zip(lines, records, strict=True):
        row = json.loads(text)
        assert record.state is MeasurementState.OK
        assert list(record.run_secs) == row["r"][0]
        assert record.unix_s == row["r"][3]
        width = sum(slot.width for slot in parse_sketch_text(record.sketch_text)[1])
        sketch = Sketch.make("w", LANGUAGE, record.sketch_text.decode(), width)
        assert to_steps(sketch, record.decisions) == row["i"][1][1]


@pytest.mark.parametrize(
    "task",
    [
        ['["f", 1]', "cuda"],
        ['["f", 1]', "llvm -keys=cpu", [24, 64, 64, 0, 0, 0, 0, 0]],
        ['["f", 1]', "llvm -keys=cpu ", [24, 64, 64, 0, 0, 0, 0, 0], "llvm", 2],
        ['["f", 1]', "llvm -keys=cpu ", [24, 64, 64, 0, 0, 0, 0, 0], "", 1, ["weight"]],
    ],
)
def test_task_tuples_of_every_version(task: list[Any]) -> None:
    record = parse_record(line(task))
    assert record.workload_key == '["f", 1]'
    assert record.target == task[1].strip()
    assert record.host == (task[3] if len(task) > 3 else "")


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (1, MeasurementState.BUILD_ERROR),
        (2, MeasurementState.BUILD_ERROR),
        (3, MeasurementState.BUILD_ERROR),
        (4, MeasurementState.RUN_ERROR),
        (5, MeasurementState.WRONG_RESULT),
        (6, MeasurementState.TIMEOUT),
        (7, MeasurementState.TIMEOUT),
        (8, MeasurementState.RUN_ERROR),
        (99, MeasurementState.RUN_ERROR),
    ],
)
def test_error_codes_are_failures(code: int, state: MeasurementState) -> None:
    record = parse_record(line(result=[[1e10], code, 3.0, 1600000000]))
    assert record.state is state
    assert record.run_secs == ()
    assert record.error is not None
    assert record.error.startswith(f"Ansor error {code}: ")


@pytest.mark.parametrize("costs", [[1e10], [10000000000], [0.1, 1e10], [2e10]])
def test_the_sentinel_is_a_failure_without_an_error_code_too(costs: list[float]) -> None:
    record = parse_record(line(result=[costs, 0, 3.0, 1600000000]))
    assert record.state is MeasurementState.RUN_ERROR
    assert record.run_secs == ()
    assert record.error is not None
    assert "1e10" in record.error


@pytest.mark.parametrize("repeats", range(1, 11))
def test_all_repeats_are_kept(repeats: int) -> None:
    costs = [0.5 + i / 8 for i in range(repeats)]
    assert parse_record(line(result=[costs, 0, 1.0, 1600000000])).run_secs == tuple(costs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line()[:-1], "cut short or not JSON"),
        (line()[: len(line()) // 2], "cut short or not JSON"),
        (b"\xff\xfe\x00", "cut short or not JSON"),
        (b"NaN", "cut short or not JSON"),
        (b"3", "not an auto_scheduler record"),
        (b"{}", "not an auto_scheduler record"),
        (b'{"i": 3, "r": [], "v": "v0.6"}', "not an auto_scheduler record"),
        (line(version="v0.7"), "'v0.7' is not one of"),
        (line(version=["v0.6"]), "is not one of"),
        (line(["k", "llvm", [], ""]), "has not 2, 3, 5 or 6 fields"),
        (line(["k"]), "has not 2, 3, 5 or 6 fields"),
        (line(["", "llvm"]), "no workload key or no target"),
        (line(["k", "  "]), "no workload key or no target"),
        (line(["k", {"kind": "llvm"}]), "no workload key or no target"),
        (line(steps={}), "the steps are not a list"),
        (line(steps=[["SP", 1]]), "step 0 is malformed"),
        (line(result=[[0.0], 0, 1.0, 1600000000]), "0.0 is not a time in seconds"),
        (line(result=[[-1.0], 0, 1.0, 1600000000]), "-1.0 is not a time in seconds"),
        (line(result=[["0.1"], 0, 1.0, 1600000000]), "'0.1' is not a time in seconds"),
        (line(result=[[], 0, 1.0, 1600000000]), "holds no time"),
        (line(result=[0.1, 0, 1.0, 1600000000]), "not a list of seconds and an error code"),
        (line(result=[[0.1], None, 1.0, 1600000000]), "not a list of seconds and an error code"),
        (line(result=[[0.1], 0, 1.0]), "not an auto_scheduler record"),
        (line(result=[[0.1], 0, 1.0, 1e300]), "is not a unix time"),
        (line(result=[[0.1], 0, 1.0, "now"]), "is not a unix time"),
    ],
)
def test_broken_lines_give_a_reason(text: bytes, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_record(text)
    assert reason in caught.value.message


@pytest.mark.parametrize("cut", range(1, len(line()), 7))
def test_a_line_cut_anywhere_is_refused(cut: int) -> None:
    with pytest.raises(InvalidInputError):
        parse_record(line()[:cut])


AUTOTVM = (
    '{"input": ["llvm -keys=cpu", "dense_nopack.x86", [["TENSOR", [1, 512], "float32"]], {}], '
    '"config": {"index": 1, "code_hash": null, "entity": []}, "result": [[0.1], 0, 1.0, 1600000000.0], '
    '"version": 0.2, "tvm_version": "0.8.dev0"}'
)
AUTOTVM_OLD = (
    '{"i": ["llvm", "topi_x86_conv2d_NCHWc", [["TENSOR", [1, 3, 224, 224], "float32"]], {}, '
    '["conv2d", [1, 3, 224, 224, "float32"]], {"i": 1, "c": null, "e": [], "t": ""}], '
    '"r": [[0.1], 0, 1.0, 1600000000.0], "v": 0.1}'
)
METASCHEDULE = "[0, [[[], []], [1.0], {}, []]]"


@pytest.mark.parametrize("text", [AUTOTVM, AUTOTVM_OLD])
def test_autotvm_is_recognised(text: str) -> None:
    assert "AutoTVM" in (foreign_format(json.loads(text)) or "")
    assert not looks_like_a_record(text.encode())
    with pytest.raises(InvalidInputError, match="AutoTVM"):
        parse_record(text.encode())


def test_other_formats_are_recognised() -> None:
    assert "MetaSchedule" in (foreign_format(json.loads(METASCHEDULE)) or "")
    assert foreign_format({"a": 1}) is None
    assert not looks_like_a_record(b'{"a": 1}')
    assert not looks_like_a_record(b"hello")
    assert looks_like_a_record(line())
    assert looks_like_a_record(line()[:30])  # cut short, still one


@pytest.mark.parametrize(
    ("key", "name", "args"),
    [
        ('["b32ed43fb351136894c322ee49097a1a"]', "ansor_b32ed43f", []),
        ('["d7b65649a4dd54becea0a52aabbc5af5", 1, 1000, 1, 1000]', "ansor_d7b65649", [1, 1000, 1, 1000]),
        ('["1097323f3970e5c881ad3a0028ca79cb", [1, 14], [4, 4]]', "ansor_1097323f", [[1, 14], [4, 4]]),
        ('["conv2d_layer", 128, 3, "SAME"]', "conv2d_layer", [128, 3, "SAME"]),
        ("b32ed43fb351136894c322ee49097a1a", "ansor_b32ed43f", []),
        ('"plain"', "plain", []),
    ],
)
def test_workload_keys(key: str, name: str, args: list[Any]) -> None:
    workload = make_workload(key)
    assert workload.name == name
    assert workload.context["language"] == "ansor"
    assert workload.context["workload_key"] == key
    assert workload.context["args"] == args
    assert make_workload(key.replace(", ", ",")).workload_id == workload.workload_id


def test_different_keys_are_different_workloads() -> None:
    keys = ['["f", 1]', '["f", 2]', '["f", [1]]', '["f"]', '["g", 1]']
    assert len({make_workload(key).workload_id for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("cuda", {"kind": "cuda"}),
        ("llvm -keys=cpu ", {"kind": "llvm", "keys": ["cpu"]}),
        (
            "llvm -keys=cpu -link-params=0 -mcpu=core-avx2 -mattr=+avx2,+fma",
            {"kind": "llvm", "keys": ["cpu"], "link-params": 0, "mcpu": "core-avx2", "mattr": ["+avx2", "+fma"]},
        ),
        (
            "cuda -keys=cuda,gpu -arch=sm_86 -max_num_threads=1024 -system-lib",
            {
                "kind": "cuda",
                "keys": ["cuda", "gpu"],
                "arch": "sm_86",
                "max_num_threads": 1024,
                "system-lib": True,
            },
        ),
        ('{"kind": "llvm", "mcpu": "skylake"}', {"kind": "llvm", "mcpu": "skylake"}),
        ("{broken", {}),
    ],
)
def test_targets_are_parsed(text: str, facts: dict[str, Any]) -> None:
    assert parse_target(text) == facts


@pytest.mark.parametrize(
    ("text", "kind", "family", "reason"),
    [
        ("llvm -keys=cpu", "llvm", "x86_64", None),
        ("c -keys=cpu", "llvm", "x86_64", None),
        ("cuda", "cuda", "cuda", None),
        ("llvm -keys=cpu", "cuda", "cuda", "target 'llvm' is not of the device's kind 'cuda'"),
        ("cuda", "llvm", "x86_64", "target 'cuda' is not of the device's kind 'llvm'"),
        ("opencl", "cuda", "cuda", "target 'opencl' is not of the device's kind 'cuda'"),
        ("{broken", "llvm", "x86_64", "target '{broken' is not of the device's kind 'llvm'"),
        (
            "llvm -mtriple=aarch64-linux-gnu",
            "llvm",
            "x86_64",
            "target triple 'aarch64-linux-gnu' is not of the device's family 'x86_64'",
        ),
        ("llvm -mtriple=arm64-apple-darwin", "llvm", "aarch64", None),
    ],
)
def test_targets_of_another_kind_conflict(text: str, kind: str, family: str, reason: str | None) -> None:
    assert target_conflict(text, {"kind": kind}, family) == reason


def test_lines_are_numbered_without_comments_and_blanks() -> None:
    text = b"\xef\xbb\xbf# comment\n\n  one \r\n#x\ntwo"
    assert list(numbered_lines(io.BytesIO(text))) == [(3, b"one"), (5, b"two")]


def test_an_endless_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_LINE_BYTES", 8)
    text = b"a" * 8 + b"\n" + b"b" * 30 + b"\nshort\n" + b"c" * 20
    assert list(numbered_lines(io.BytesIO(text))) == [
        (1, b"aaaaaaaa"),
        (2, b"bbbbbbbb"),
        (3, b"short"),
        (4, b"cccccccc"),
    ]


def test_streams_are_left_open_and_gzip_is_recognised() -> None:
    for raw in (b"one\ntwo", gzip.compress(b"one\ntwo")):
        source = io.BytesIO(raw)
        with open_log(source) as stream:
            assert list(numbered_lines(stream)) == [(1, b"one"), (2, b"two")]
        assert not source.closed


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidInputError, match=r"nothing\.json cannot be read: No such file"),
        open_log(tmp_path / "nothing.json"),
    ):
        pass


def test_logs_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.json", "sub/b.log.gz", "sub/c.jsonl", "README.md", ".hidden/d.json", "e.gz", "f.npz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [str(p.relative_to(tmp_path)) for p in log_files(tmp_path)] == ["a.json", "sub/b.log.gz", "sub/c.jsonl"]
