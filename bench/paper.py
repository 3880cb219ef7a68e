"""The paper's network, and how its code (`mtl_tlp_train.py`) trains it, for comparison: `bench/model.py` uses it.

About 1,024 programs a step, all of a device ranked against each other whatever their workload; constant rate.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from tlp.language.metaschedule_encoder import LAYOUTS, PAPER_ENCODER_VERSION
from tlp.model.config import TLPConfig
from tlp.model.losses import LOSSES, lambda_rank
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.trainer import IntArray, TrainingRun, TrainOptions

LOSSES["lambda_rank_paper"] = partial(lambda_rank, gain=1.0)  # 2^y − 1
OPTIONS = TrainOptions(
    epochs=50, batch_lists=16, learning_rate=7e-4, weight_decay=1e-6, loss="lambda_rank_paper", clip=0.5
)


def config(heads: tuple[str, ...]) -> TLPConfig:
    """The network as published: raw numbers, raw tokens, padding summed."""
    layout = LAYOUTS[PAPER_ENCODER_VERSION]
    return TLPConfig(
        heads,
        encoder_version=PAPER_ENCODER_VERSION,
        length=layout.length,
        width=layout.width,
        dims=(64, 128, 256, 256),
        mask_padding=False,
        token_table=False,
        dropout=0.0,
    )


def head_rows(values: Tensor, lists: list[IntArray], empty: float) -> Tensor:
    """`(B, H)` of programs in lists as `(H, G·N)`: one row per head, padded as by `padded_lists`."""
    N = max(map(len, lists))
    place = np.concatenate([i * N + np.arange(len(members)) for i, members in enumerate(lists)])
    flat = torch.full((len(lists) * N, values.shape[1]), empty, device=values.device, dtype=values.dtype)
    return flat.index_copy(0, torch.from_numpy(place).to(values.device), values).t()


class ConstantRateRun(TrainingRun):
    """Trains at one learning rate from the first step to the last."""

    rate = staticmethod(lambda step, steps: 1.0)


class PaperRun(ConstantRateRun):
    """Ranks all programs of a step against each other."""

    rows = staticmethod(head_rows)
    by_list = False


class PaperStrategy(JointStrategy):
    """Trains as the paper's code does."""

    run_type = PaperRun


class ConstantRateStrategy(JointStrategy):
    """Trains at a constant rate."""

    run_type = ConstantRateRun
