"""The network against a plain reference with attention written out, at tiny size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tlp.errors import InvalidInputError
from tlp.language import encoder as layout
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP

TINY = TLPConfig(heads=("a", "b"), length=5, words=8, dims=(6, 8), attention_heads=2, residual_blocks=1, head_dims=(4,))


def random_programs(count: int, length: int, seed: int = 0) -> Tensor:
    """Random rows, at least one per program, padding at the end."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.zeros(count, length, layout.WIDTH)
    for program in range(count):
        rows = int(torch.randint(1, length + 1, (1,), generator=rng))
        for row in range(rows):
            x[program, row, int(torch.randint(1, layout.KIND_SLOTS, (1,), generator=rng))] = 1.0
            x[program, row, layout.WORDS] = torch.randint(0, 12, (3,), generator=rng).float()
            x[program, row, layout.LOOP] = float(torch.randint(0, layout.LOOP_SLOTS, (1,), generator=rng))
            x[program, row, layout.NUMBERS] = torch.randn(layout.WIDTH - layout.NUMBERS.start, generator=rng)
    return x


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return x @ layer.weight.T + layer.bias


def reference(network: MTLTLP, x: Tensor) -> Tensor:
    """`MTLTLP.forward`, one program and one row at a time."""
    config = network.config
    scores = torch.zeros(len(x), len(config.heads))
    for b, program in enumerate(x):
        used = [row for row in program if bool(row[layout.KIND].any()) or not config.mask_padding]
        embedded = []
        for row in used:
            if config.token_table:
                numbers = torch.cat([row[layout.KIND], row[layout.NUMBERS]])
                h = linear(network.input, numbers)
                for token in row[layout.WORDS].long().tolist():
                    h = h + network.words.weight[token if token < config.words else 1]
                h = h + network.loops.weight[int(row[layout.LOOP])]
            else:
                h = linear(network.input, row)
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
    "config", [TINY, replace(TINY, mask_padding=False, token_table=False), replace(TINY, residual_blocks=2)]
)
def test_equals_the_reference(config: TLPConfig) -> None:
    torch.manual_seed(0)
    network = MTLTLP(config).eval()
    x = random_programs(6, 5)
    with torch.no_grad():
        torch.testing.assert_close(network(x), reference(network, x), rtol=1e-4, atol=1e-5)


def test_padding_and_neighbours_do_not_change_a_score() -> None:
    torch.manual_seed(0)
    network = MTLTLP(TINY).eval()
    x = random_programs(6, 5)
    longer = torch.cat([x, torch.zeros(6, 4, layout.WIDTH)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(network(x), network(longer))
        torch.testing.assert_close(network(x)[2:3], network(x[2:3]))
        assert network(x[:0]).shape == (0, 2)


def test_a_program_without_rows_scores_zero() -> None:
    assert MTLTLP(TINY).eval()(torch.zeros(1, 5, layout.WIDTH)).tolist() == [[0.0, 0.0]]


def test_the_papers_size() -> None:
    """About 676K parameters with one head; each further head about 41K (C→128→64→1)."""
    count = {h: sum(p.numel() for p in MTLTLP(TLPConfig(heads=h)).parameters()) for h in [("a",), ("a", "b")]}
    assert 540_000 < count[("a",)] < 720_000
    assert count[("a", "b")] - count[("a",)] == 256 * 128 + 128 + 128 * 64 + 64 + 64 + 1


def test_add_head_copies_a_head() -> None:
    torch.manual_seed(0)
    network = MTLTLP(TINY).eval()
    network.add_head("c", from_head="b")
    assert network.head_names == ("a", "b", "c")
    with torch.no_grad():
        scores = network(random_programs(3, 5))
    torch.testing.assert_close(scores[:, 2], scores[:, 1])
    with pytest.raises(InvalidInputError, match="already"):
        network.add_head("c")
    with pytest.raises(InvalidInputError, match="no head 'x'"):
        network.add_head("d", from_head="x")
