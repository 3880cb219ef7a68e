"""The network against a plain reference with attention written out, at tiny size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bench import paper
from tlp.language import metaschedule_encoder as layout
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP

FIRST = layout.LAYOUTS[layout.FIRST_ENCODER_VERSION]
PROFILED = TLPConfig(
    heads=("a", "b"),
    length=9,
    words=8,
    dims=(6, 8),
    attention_heads=2,
    residual_blocks=1,
    head_dims=(4,),
    profile_bins=3,
)
TINY = replace(PROFILED, encoder_version=layout.FIRST_ENCODER_VERSION, length=5, width=FIRST.width)


def random_programs(count: int, config: TLPConfig = TINY, seed: int = 0) -> Tensor:
    """Random profile, random rows, at least one per program, padding at the end."""
    rng = torch.Generator().manual_seed(seed)
    first = config.profile_rows
    x = torch.zeros(count, config.length, config.width)
    x[:, :first] = 40.0 * torch.rand(count, first, config.width, generator=rng) - 4.0
    for program in range(count):
        rows = int(torch.randint(1, config.length - first + 1, (1,), generator=rng))
        for row in range(first, first + rows):
            x[program, row, int(torch.randint(1, layout.KIND_SLOTS, (1,), generator=rng))] = 1.0
            x[program, row, layout.WORDS] = torch.randint(0, 12, (3,), generator=rng).float()
            x[program, row, layout.LOOP] = float(torch.randint(0, layout.LOOP_SLOTS, (1,), generator=rng))
            x[program, row, layout.SCALARS.start :] = torch.randn(config.width - layout.SCALARS.start, generator=rng)
    return x


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return x @ layer.weight.T + layer.bias


def profile_reference(network: MTLTLP, rows: Tensor) -> Tensor:
    """The profile's part of a program's rows, one number and one bin at a time."""
    layers = network.profile.layers
    spread = []
    for q in range(network.config.profile_bins):
        for k, number in enumerate(rows.flatten()[: network.profile_width].tolist()):
            low, span = float(network.profile.low[q, k]), float(network.profile.span[q, k])
            spread.append(0.0 if span == 0 else 2.0 * min(max((number - low) / span, 0.0), 1.0) - 1.0)
    return linear(layers[3], nn.functional.gelu(linear(layers[0], torch.tensor(spread))))


def reference(network: MTLTLP, x: Tensor) -> Tensor:
    """`MTLTLP.forward`, one program and one row at a time."""
    config = network.config
    scores = torch.zeros(len(x), len(config.heads))
    for b, program in enumerate(x):
        primitives = program[config.profile_rows :]
        profile = profile_reference(network, program[: config.profile_rows]) if config.profile_rows else 0.0
        used = [row for row in primitives if bool(row[layout.KIND].any()) or not config.mask_padding]
        embedded = []
        for row in used:
            if config.token_table:
                numbers = (row[layout.SCALARS.start :] - network.mean) * network.scale
                numbers = torch.cat([row[layout.KIND], numbers])
                h = linear(network.input, numbers)
                for token in row[layout.WORDS].long().tolist():
                    h = h + network.words.weight[token if token < config.words else 1]
                h = h + network.loops.weight[int(row[layout.LOOP])]
            else:
                h = linear(network.input, row)
            h = h + profile
            for layer in network.embed:
                h = linear(layer, h.clamp_min(0.0))
            embedded.append(h.clamp_min(0.0))
        width = config.dims[-1]
        part = width // config.attention_heads
        qkv = [linear(network.attention_in, h) for h in embedded]
        for i, h in enumerate(embedded):
            out = []
            for head in range(config.attention_heads):
                q, k, v = (slice(which * width + head * part, which * width + (head + 1) * part) for which in range(3))
                weights = torch.stack([qkv[i][q] @ other[k] / math.sqrt(part) for other in qkv])
                weights = weights.exp() / weights.exp().sum()
                out.append(sum(w * other[v] for w, other in zip(weights, qkv, strict=True)))
            h = h + linear(network.attention_out, torch.cat(out))
            for block in network.residuals:
                h = linear(block.linear, h).clamp_min(0.0) + h
            for column, head_layers in enumerate(network.heads):
                value = h
                for layer in head_layers:
                    value = value.clamp_min(0.0) if isinstance(layer, nn.ReLU) else linear(layer, value)
                scores[b, column] += value[0]
    return scores


@pytest.mark.parametrize(
    "config",
    [
        PROFILED,
        TINY,
        replace(TINY, mask_padding=False, token_table=False),
        replace(TINY, residual_blocks=2),
        replace(PROFILED, mask_padding=False, token_table=False),
    ],
)
def test_equals_the_reference(config: TLPConfig) -> None:
    torch.manual_seed(0)
    network = MTLTLP(config).eval()
    x = random_programs(6, config)
    network.calibrate(random_programs(40, config, seed=1))
    for head in network.heads:  # heads that add nothing yet would hide a mistake
        nn.init.normal_(head[-1].weight)
    with torch.no_grad():
        torch.testing.assert_close(network(x), reference(network, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [PROFILED, TINY])
def test_padding_and_neighbours_do_not_change_a_score(config: TLPConfig) -> None:
    torch.manual_seed(0)
    network = MTLTLP(config).eval()
    x = random_programs(6, config)
    longer = torch.cat([x, torch.zeros(6, 4, config.width)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(network(x), network(longer))
        torch.testing.assert_close(network(x)[2:3], network(x[2:3]))
        assert network(x[:0]).shape == (0, 2)


def test_a_program_without_rows_scores_zero() -> None:
    assert MTLTLP(TINY).eval()(torch.zeros(1, 5, TINY.width)).tolist() == [[0.0, 0.0]]


def test_the_papers_size() -> None:
    """About 676K parameters with one head; each further head about 41K (C→128→64→1)."""
    count = {h: sum(p.numel() for p in MTLTLP(paper.config(h)).parameters()) for h in [("a",), ("a", "b")]}
    assert 540_000 < count[("a",)] < 720_000
    assert count[("a", "b")] - count[("a",)] == 256 * 128 + 128 + 128 * 64 + 64 + 64 + 1


def test_bins_without_width_are_left_out() -> None:
    network = MTLTLP(PROFILED).eval()
    x = random_programs(30, PROFILED)
    x[:, 0, 0] = 3.0  # the same in all programs
    network.calibrate(x)
    assert network.profile.span[:, 0].tolist() == [0.0] * 3 and bool((network.profile.span[:, 1] > 0).all())
    other = x.clone()
    other[:, 0, 0] = 1e6
    with torch.no_grad():
        torch.testing.assert_close(network(x), network(other))
