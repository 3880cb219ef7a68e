from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from bench.synthetic import matmul_context, matmul_sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.metaschedule_encoder import ENCODER_VERSION
from tlp.language.vocabulary import Vocabulary
from tlp.model import predictor
from tlp.model.checkpoint import CONFIG, MANIFEST, VOCABULARY, WEIGHTS, Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.nearest import nearest_head, x86_level
from tlp.model.network import MTLTLP
from tlp.model.predictor import Predictor

HEADS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")

CONTEXT = matmul_context(64, 64, 16)


@pytest.fixture
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    config = TLPConfig(HEADS, words=64, dims=(8, 16), attention_heads=2, head_dims=(8,))
    manifest = Manifest(
        family="x86_64",
        encoder_version=ENCODER_VERSION,
        heads=HEADS,
        targets={name: {"kind": "llvm", "mcpu": name, "num-cores": 1} for name in HEADS},
        samples={"x86-64-v2": 10, "x86-64-v3": 20, "x86-64-v4": 5},
        watermark=35,
        holdout=("held",),
        strategy="joint",
        parent=None,
        seeds=(0,),
        metrics={"train_loss": 1.5},
        curves={"train_loss": [2.0, 1.5]},
    )
    state = {key: value.detach().clone() for key, value in MTLTLP(config).state_dict().items()}
    return Checkpoint(config, Vocabulary().extended(words=["T_matmul_NT", "root"]), manifest, state)


def test_save_and_load_are_inverse(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == sorted([WEIGHTS, CONFIG, VOCABULARY, MANIFEST])
    again = Checkpoint.load(folder)
    assert (again.config, again.vocabulary, again.manifest) == (
        checkpoint.config,
        checkpoint.vocabulary,
        checkpoint.manifest,
    )
    sketch = replace(matmul_sketch("w", cache_write=True), context=CONTEXT)
    decisions = [[1, 2, 4, 8, 2, 2, 2, 2, 4, 4, 1], [8, 4, 2, 1, 2, 2, 2, 2, 4, 4, 3]]
    for device in HEADS:
        before, after = Predictor(checkpoint, device), Predictor(again, device)
        assert before.score(sketch, decisions).tolist() == after.score(sketch, decisions).tolist()


@pytest.mark.parametrize("switches", [{"common_head": False}, {"common_head": False, "positions": False}])
def test_a_checkpoint_of_an_earlier_release_is_read(
    checkpoint: Checkpoint, tmp_path: Path, switches: dict[str, bool]
) -> None:
    folder = checkpoint.save(tmp_path / "model")
    edit(CONFIG, lambda config: config.update(switches))(folder)
    edit(MANIFEST, lambda manifest: [manifest.pop(key) for key in ("kind", "watermarks")])(folder)
    again = Checkpoint.load(folder)
    assert (again.config, again.manifest) == (checkpoint.config, checkpoint.manifest)


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def edit_weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = load((folder / WEIGHTS).read_bytes())
        change(state)
        (folder / WEIGHTS).write_bytes(save(state))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), "weights.safetensors cannot be read"),
        (lambda folder: (folder / VOCABULARY).unlink(), "vocabulary.json cannot be read"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 40), "damaged"),
        (lambda folder: (folder / CONFIG).write_text("{"), "damaged"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "not a JSON object"),
        (edit(CONFIG, lambda c: c.update(encoder_version="metaschedule-99")), "'metaschedule-99'.*metaschedule-1"),
        (edit(CONFIG, lambda c: c.pop("dims")), "dims is missing"),
        (edit(CONFIG, lambda c: c.update(words="many")), "words is 'many' .*integer"),
        (edit(CONFIG, lambda c: c.update(extra=1)), "extra is unknown"),
        (edit(CONFIG, lambda c: c.update(positions=True)), "positions is unknown"),
        (edit(CONFIG, lambda c: c.update(attention_heads=0)), "config.json: no network has dims"),
        (edit(CONFIG, lambda c: c.update(words=32)), r"words.weight is \(64, 8\), expected \(32, 8\)"),
        (edit(CONFIG, lambda c: c.update(width=3)), "row width is 3, expected"),
        (edit(CONFIG, lambda c: c.update(dims=["a", 16])), r"dims is \['a', 16\]"),
        (edit(CONFIG, lambda c: c.update(head_dims=[True])), r"head_dims is \[True\]"),
        (edit(CONFIG, lambda c: c.update(heads=[*HEADS, 5])), "heads is .*string"),
        (edit(CONFIG, lambda c: c.update(profile_bins=True)), "profile_bins is True"),
        (edit(CONFIG, lambda c: c.update(dims=[10**30])), "dims is "),
        (edit(CONFIG, lambda c: c.update(residual_blocks=10**9)), "residual_blocks is 1000000000"),
        (edit(MANIFEST, lambda m: m.update(heads=["x"])), "heads is"),
        (edit(MANIFEST, lambda m: m.update(format=99)), "format 99, this release reads format 1"),
        (edit(MANIFEST, lambda m: m.pop("watermark")), "manifest.json does not fit"),
        (edit(MANIFEST, lambda m: m.update(watermark="x")), "does not fit this release: watermark is 'x'"),
        (edit(MANIFEST, lambda m: m.update(samples={"x86-64-v2": None})), "samples is"),
        (edit(MANIFEST, lambda m: m.update(targets=[])), "targets is"),
        (edit(MANIFEST, lambda m: m.update(curves={"train_loss": "x"})), "curves is"),
        (edit(VOCABULARY, lambda v: v.update(kinds="abc")), "needs the lists"),
        (edit(VOCABULARY, lambda v: v["words"].append(5)), "needs the lists"),
        (edit(VOCABULARY, lambda v: v["words"].append("root")), "occur once"),
        (edit_weights(lambda s: s.pop("input.bias")), r"input.bias is None"),
        (edit_weights(lambda s: s["input.bias"].fill_(float("nan"))), "not finite: input.bias"),
    ],
)
def test_a_damaged_directory_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = checkpoint.save(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelFormatError, match=message) as caught:
        Checkpoint.load(folder)
    assert caught.value.next_command


def test_score_many_keeps_the_order(checkpoint: Checkpoint) -> None:
    first, two = (replace(matmul_sketch("w", cache_write=flag), context=CONTEXT) for flag in (False, True))
    programs = [(first, [1, 2, 4, 8, 2, 2, 2, 2, 4, 4, i % 4]) for i in range(4)]
    programs += [(two, [8, 4, 2, 1, 2, 2, 2, 2, 4, 4, i % 4]) for i in range(4)]
    programs = programs[::2] + programs[1::2]
    scorer = Predictor(checkpoint, "x86-64-v3")
    got = scorer.score_many(programs)
    want = [float(scorer.score(sketch, [decisions])[0]) for sketch, decisions in programs]
    assert got.tolist() == pytest.approx(want, abs=1e-6)
    assert scorer.score_many([]).shape == (0,)
    assert scorer.score(first, np.empty((0, first.decision_width), int)).shape == (0,)
    with pytest.raises(InvalidInputError, match="decisions"):
        scorer.score(first, [[1] * (first.decision_width // 2)] * 2)
    assert scorer.score(first, [[1] * 10 + [0]][:0] or [[1] * 10 + [0]]).shape == (1,)


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ({"kind": "llvm", "mcpu": "znver4", "num-cores": 2}, "x86-64-v4"),
        ({"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512f"], "num-cores": 2}, "x86-64-v3"),
        ({"kind": "llvm", "mcpu": "haswell"}, "x86-64-v3"),
        ({"kind": "llvm", "mcpu": "nehalem"}, "x86-64-v2"),
    ],
)
def test_an_unknown_device_is_scored_by_the_most_similar_head(
    checkpoint: Checkpoint, target: dict[str, Any], head: str
) -> None:
    predictor = Predictor(checkpoint, "mine", target=target, family="x86_64")
    assert predictor.head == head and predictor.is_stand_in
    assert not Predictor(checkpoint, "x86-64-v2", target=target, family="x86_64").is_stand_in


def test_another_family_has_no_stand_in(checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidInputError, match=r"'aarch64'.*'x86_64'"):
        nearest_head(checkpoint, "pi", {"kind": "llvm", "mcpu": "cortex-a72"}, "aarch64")
    with pytest.raises(InvalidInputError, match="no head for 'pi'"):
        nearest_head(checkpoint, "pi", None, None)


def test_x86_levels() -> None:
    assert [x86_level({"mcpu": cpu}) for cpu in ("x86-64", "x86-64-v2", "znver3", "znver5", "what")] == [1, 2, 3, 4, 2]


def test_scores_do_not_depend_on_the_number_of_threads(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "BATCH", 5)
    sketches = [replace(matmul_sketch("w", cache_write=flag), context=CONTEXT) for flag in (False, True)]
    programs = [(sketches[i % 2], [1, 2, 4, 2**i, 2, 2, 2, 2, 4, 4, i % 4]) for i in range(8)] * 3
    before = torch.get_num_threads()
    by_threads = []
    for threads in (1, 2):
        by_threads.append(Predictor(checkpoint, "x86-64-v3", threads=threads).score_many(programs).tolist())
        assert torch.get_num_threads() == threads
    assert by_threads[0] == by_threads[1] and len(set(by_threads[0])) > 4
    torch.set_num_threads(before)
