"""ListNet, a loss that `bench/model.py` compares with; importing this adds it to `LOSSES`."""

from __future__ import annotations

import torch
from torch import Tensor

from tlp.model.losses import LOSSES


def list_net(scores: Tensor, labels: Tensor, mask: Tensor, temperature: float = 0.1) -> Tensor:
    """ListNet (top one): cross-entropy between softmax(labels / temperature) and softmax(scores).

    Args and return value as `lambda_rank`.
    """
    floor = torch.finfo(scores.dtype).min
    target = torch.softmax((labels / temperature).masked_fill(~mask, floor), dim=1) * mask
    log_p = torch.log_softmax(scores.masked_fill(~mask, floor), dim=1)
    counts = mask.sum(dim=1) > 1
    per_group = -(target * log_p.masked_fill(~mask, 0.0)).sum(dim=1) * counts
    return per_group.sum() / counts.sum().clamp_min(1)


LOSSES["list_net"] = list_net
