"""Ranking losses over padded groups.

A group is the programs of one workload on one device; only programs of one group are compared (the paper's code
compares across workloads, which mixes seconds of different subgraphs).

Notation: G groups, N programs in the largest. Labels are min_latency / latency in (0, 1], 1 = fastest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

# With 2^y − 1 the second best program, half as fast as the best, is worth 0.41 of it; only the best is of use here, and
# 2^(6·y) − 1 makes that 0.11. Cross-validated over networks: top-1 0.51 → 0.61 (together with a higher learning rate).
GAIN = 6.0


def lambda_rank(scores: Tensor, labels: Tensor, mask: Tensor, gain: float = GAIN) -> Tensor:
    """LambdaRank: pairwise logistic loss weighted by how much NDCG the swap would change.

    For labels y_i > y_j: |g_i − g_j|·|1/d_i − 1/d_j| · log2(1 + exp(s_j − s_i)), with g = (2^(gain·y) − 1)/maxDCG,
    d = log2(1 + rank by score). Mean over groups with at least two programs. (Burges 2010; the paper's §4.4.)

    Args:
        scores: `(G, N)`.
        labels: `(G, N)` in [0, 1].
        mask: `(G, N)` bool; False: no program, or no label.
        gain: steepness of the gain.

    Returns:
        Scalar; 0 if no group has two programs.
    """
    with torch.no_grad():
        ranked = scores.detach().masked_fill(~mask, -torch.inf)
        order = ranked.argsort(dim=1, descending=True, stable=True)
        N = scores.shape[1]
        ranks = torch.empty_like(order)
        ranks.scatter_(1, order, torch.arange(N, device=scores.device).expand_as(order).contiguous())
        discount = 1.0 / torch.log2(ranks + 2.0)  # (G, N)
        raw_gain = (torch.exp2(gain * labels) - 1.0) * mask
        ideal = raw_gain.sort(dim=1, descending=True).values
        positions = 1.0 / torch.log2(torch.arange(N, device=scores.device) + 2.0)
        g = raw_gain / (ideal * positions).sum(dim=1, keepdim=True).clamp_min(1e-9)
        better = (labels[:, :, None] > labels[:, None, :]) & mask[:, :, None] & mask[:, None, :]
        weight = (g[:, :, None] - g[:, None, :]).abs() * (discount[:, :, None] - discount[:, None, :]).abs()
        weight = weight * better  # (G, N, N)
        groups = (mask.sum(dim=1) > 1).sum().clamp_min(1)
    logistic = F.softplus(scores[:, None, :] - scores[:, :, None]) / 0.6931471805599453
    return (weight * logistic).sum() / groups


def distillation(scores: Tensor, taught: Tensor, spread: Tensor) -> Tensor:
    """How far scores are from those of a teacher, in the teacher's own spread; only differences within a list count.

    Per list the mean of ((s - mean s) - (t - mean t))^2 / spread^2, then the mean over lists with two taught programs.
    (Learning without Forgetting, Li & Hoiem 2016, arXiv 1606.09282; squared error on the scores instead of a softmax
    over classes, since a ranking's scores have no classes.)

    Args:
        scores: `(R, N)`.
        taught: `(R, N)` the teacher's scores; NaN: not taught.
        spread: `(R,)` the teacher's standard deviation within a list, positive.

    Returns:
        Scalar; 0 if no list has two taught programs.
    """
    mask = ~taught.isnan()
    count = mask.sum(dim=1)
    used = count > 1
    difference = torch.where(mask, scores - taught.nan_to_num(0.0), 0.0)
    centre = difference.sum(dim=1) / count.clamp_min(1)
    squared = torch.where(mask, difference - centre[:, None], 0.0).square().sum(dim=1) / count.clamp_min(1)
    return (squared / spread.square() * used).sum() / used.sum().clamp_min(1)


LOSSES: dict[str, Loss] = {
    "lambda_rank": lambda_rank,
}
