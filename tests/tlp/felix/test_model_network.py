"""Felix's network: a slow plain reference, padding, gradients, and what a checkpoint refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.felix.config import FEATURE_VERSION, KIND, NAMES, WIDTH, FelixConfig
from tlp.felix.network import FelixCheckpoint, FelixNetwork
from tlp.felix.scorer import FelixModel, load_felix
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.kinds import load_model

HEADS = ("x86-64-v2", "x86-64-v3")
SMALL = FelixConfig(HEADS, dims=(12, 8), bins=3, residual_blocks=2)


def made(config: FelixConfig = SMALL, seed: int = 0) -> FelixNetwork:
    torch.manual_seed(seed)
    network = FelixNetwork(config)
    network.calibrate(rows(64, seed))
    return network.eval()


def rows(count: int, seed: int) -> Tensor:
    """Most numbers 0, as real ones; one column constant."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, 20, (count, WIDTH)) * (rng.random((count, WIDTH)) < 0.5)
    values[:, 3] = 1.0
    return torch.from_numpy(values.astype(np.float32))


def batch(counts: list[int], seed: int, S: int | None = None) -> tuple[Tensor, Tensor]:
    longest = max(S or 0, *counts)
    mask = torch.arange(longest) < torch.tensor(counts)[:, None]
    return rows(len(counts) * longest, seed).view(len(counts), longest, WIDTH) * mask[..., None], mask


def manifest(config: FelixConfig) -> Manifest:
    return Manifest(
        family="x86_64",
        encoder_version=FEATURE_VERSION,
        heads=config.heads,
        targets={name: {"kind": "llvm", "mcpu": name, "num-cores": 1} for name in config.heads},
        samples=dict.fromkeys(config.heads, 10),
        watermark=20,
        holdout=(),
        strategy="joint",
        parent=None,
        seeds=(0,),
        kind=KIND,
    )


def checkpoint(config: FelixConfig = SMALL) -> FelixCheckpoint:
    return FelixCheckpoint(config, manifest(config), made(config).state_dict())


def plain_score(network: FelixNetwork, stores: list[list[float]], head: str) -> float:
    """One program, one number at a time, in double precision, as the module's text says."""
    state = {key: value.double().numpy() for key, value in network.state_dict().items()}

    def silu(x: float) -> float:
        return x / (1.0 + math.exp(-x))

    def linear(name: str, x: list[float]) -> list[float]:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]

    total = [0.0] * network.config.dims[-1]
    for store in stores:
        h = [(x - m) * s for x, m, s in zip(store, state["mean"], state["scale"], strict=True)]
        for low, span in zip(state["low"], state["span"], strict=True):
            for x, a, width in zip(store, low, span, strict=True):
                h.append(2.0 * min(max((x - a) / width, 0.0), 1.0) - 1.0 if width > 0 else 0.0)
        for layer in range(len(network.config.dims)):
            h = [silu(v) for v in linear(f"layers.{layer}", h)]
        total = [a + b for a, b in zip(total, h, strict=True)]
    for layer in range(network.config.residual_blocks):
        total = [v + silu(u) for v, u in zip(total, linear(f"residuals.{layer}", total), strict=True)]
    return linear("heads", total)[network.config.heads.index(head)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    bins=st.integers(0, 3),
    head=st.sampled_from(HEADS),
)
def test_scores_are_those_of_the_plain_reference(seed: int, counts: list[int], bins: int, head: str) -> None:
    network = made(replace(SMALL, bins=bins), seed)
    features, mask = batch(counts, seed + 1)
    with torch.no_grad():
        scores = network(features, mask, head).numpy()
        flat = network.ragged(
            features[mask], torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), len(counts)
        )
    expected = [plain_score(network, features[i, : counts[i]].tolist(), head) for i in range(len(counts))]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(flat[:, HEADS.index(head)].numpy(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), fill=st.sampled_from([0.0, 7.0, 1e30, math.nan, math.inf]))
def test_what_stands_in_the_padding_does_not_count(seed: int, fill: float) -> None:
    network = made(seed=seed)
    clean, mask = batch([1, 3, 2], seed)
    dirty = torch.where(mask[..., None], clean, torch.tensor(fill)).requires_grad_()
    clean.requires_grad_()
    scores = [network(features, mask, HEADS[1]) for features in (clean, dirty)]
    assert torch.equal(*scores)
    for part in scores:
        part.sum().backward()
    assert clean.grad is not None and dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad)
    assert bool((dirty.grad[~mask] == 0).all()) and bool(torch.isfinite(dirty.grad).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in network.parameters() if p.grad is not None)


def test_more_padding_and_other_company_change_nothing_to_speak_of() -> None:
    network = made()
    alone, mask = batch([2], 5)
    longer = torch.zeros(1, 9, WIDTH)
    longer[:, :2] = alone
    wide = torch.zeros(1, 9, dtype=torch.bool)
    wide[:, :2] = mask
    with torch.no_grad():
        by_itself = network(alone, mask, HEADS[0])
        torch.testing.assert_close(network(longer, wide, HEADS[0]), by_itself, rtol=1e-5, atol=1e-5)
        many = network(alone.repeat(7, 1, 1), mask.repeat(7, 1), HEADS[0])
    torch.testing.assert_close(many, by_itself.repeat(7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bins", [0, 3])
def test_gradients_agree_with_finite_differences(bins: int) -> None:
    """In double precision, where no feature stands on the edge of a bin."""
    network = made(replace(SMALL, bins=bins)).double().requires_grad_(False)
    features, mask = batch([2, 3], 3)
    assert torch.autograd.gradcheck(
        lambda x: network(x, mask, HEADS[0]), features.double().add(0.01234).requires_grad_(), eps=1e-7, atol=1e-4
    )


def test_a_feature_that_never_varied_does_not_count() -> None:
    network = made()
    features, mask = batch([2], 1)
    other = features.clone()
    other[..., 3] = 17.0  # 1 in every training program
    assert torch.equal(network(features, mask, HEADS[0]), network(other, mask, HEADS[0]))


def test_hidden_is_what_the_head_reads() -> None:
    model = FelixModel(checkpoint(), HEADS[1])
    features, mask = batch([1, 2, 3], 4)
    features.requires_grad_()
    scores = model.score(features, mask)
    weight, bias = model.linear()
    torch.testing.assert_close(model.hidden(features, mask) @ weight + bias, scores)
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None and features.grad.abs().sum() > 0
    assert not weight.requires_grad  # only features have gradients


def test_a_device_without_a_head_is_scored_by_the_nearest() -> None:
    model = FelixModel(checkpoint(), "new", target={"kind": "llvm", "mcpu": "haswell"}, family="x86_64")
    assert model.is_stand_in and model.head == "x86-64-v3"
    with pytest.raises(InvalidInputError, match="family 'aarch64'"):
        FelixModel(checkpoint(), "new", target={"kind": "llvm"}, family="aarch64")
    with pytest.raises(InvalidInputError, match="no head for 'other'"):
        made()(*batch([1], 0), "other")


def test_save_and_load_are_inverse(tmp_path: Path) -> None:
    saved = checkpoint()
    folder = saved.save(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "weights.safetensors"]
    loaded = load_model(folder)
    assert isinstance(loaded, FelixCheckpoint)
    assert (loaded.config, loaded.manifest) == (saved.config, saved.manifest)
    assert all(torch.equal(loaded.state[key], value) for key, value in saved.state.items())
    features, mask = batch([2, 1], 0)
    before, two = FelixModel(saved, HEADS[0]), load_felix(folder, HEADS[0])
    assert torch.equal(before.score(features, mask), two.score(features, mask))
    np.testing.assert_array_equal(before.score_features(features.numpy()), before.score(features, mask).numpy())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", {"kind": "mtl-tlp"}, "encoder"),
        ("manifest.json", {"kind": "other"}, "of kind 'other'"),
        ("manifest.json", {"kind": 3}, "kind"),
        ("manifest.json", {"heads": ["x"]}, "heads"),
        ("manifest.json", {"encoder_version": "metaschedule-felix-0"}, "features"),
        ("config.json", {"features": [*NAMES[1:], NAMES[0]]}, "other features"),
        ("config.json", {"dims": [12, 9]}, "do not fit"),
        ("config.json", {"dims": [-1]}, "config.json"),
        ("config.json", {"dims": "wide"}, "config.json"),
        ("config.json", {"extra": 1}, "unknown"),
        ("config.json", {"heads": ["x86-64-v2"]}, "heads"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, name: str, change: dict[str, object], message: str
) -> None:
    folder = checkpoint().save(tmp_path / "model")
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFormatError, match=message):
        load_model(folder)


def test_damaged_weights_and_another_kind_are_refused(tmp_path: Path) -> None:
    saved = checkpoint()
    folder = saved.save(tmp_path / "model")
    with pytest.raises(ModelFormatError):
        Checkpoint.load(folder)  # not MTL-TLP's
    (folder / "weights.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelFormatError, match="damaged"):
        load_felix(folder, HEADS[0])
    state = dict(saved.state) | {"mean": torch.full((WIDTH,), math.nan)}
    folder = replace(saved, state=state).save(tmp_path / "nan")
    with pytest.raises(ModelFormatError, match="not finite"):
        load_felix(folder, HEADS[0])
    (folder / "manifest.json").unlink()
    with pytest.raises(ModelFormatError):
        load_model(folder)
