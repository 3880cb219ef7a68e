"""Networks in plain torch, so that extracting tasks needs no torchvision and no download.

Weights are random under a fixed seed (`SEED`): latency does not depend on their values, and a deployed library must
be comparable with torch. Convolutional networks are written as conv → BatchNorm → activation so that
`folding.fold_batch_norm` can fold every BatchNorm. Batch 1, float32, eval mode.

`BUILTIN` maps a name to its factory; a factory returns `(module, example_args)`. Importing
this module imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import nn

SEED: Final = 0
IMAGE: Final = (1, 3, 224, 224)
SEQUENCE: Final = 128  # tokens; BERT's usual length for latency figures
VOCABULARY: Final = 30522

Factory = Callable[[], "tuple[nn.Module, tuple[torch.Tensor, ...]]"]


def _factory(module: str, build: str, shape: tuple[int, ...], vocabulary: int = 0) -> Factory:
    """Factory for `tlp.programs.MODULE.BUILD()`; its input is token ids if `vocabulary` is given, else noise."""

    def factory() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        import torch

        builder = getattr(importlib.import_module(f"tlp.programs.{module}"), build)
        # fork_rng: asking for a network must not move the caller's random state.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            network: nn.Module = builder()
            example = torch.randint(0, vocabulary, shape) if vocabulary else torch.randn(shape)
        return network.eval(), (example,)

    return factory


BUILTIN: Final[Mapping[str, Factory]] = MappingProxyType(
    {
        "bert_base": _factory("zoo_bert", "bert_base", (1, SEQUENCE), VOCABULARY),
        "bert_tiny": _factory("zoo_bert", "bert_tiny", (1, SEQUENCE), VOCABULARY),
        "dcgan": _factory("zoo_small", "dcgan", (1, 100)),
        "mlp": _factory("zoo_small", "mlp", (1, 784)),
        "mobilenet_v2": _factory("zoo_mobile", "mobilenet_v2", IMAGE),
        "resnet_18": _factory("zoo_resnet", "resnet_18", IMAGE),
        "resnet_50": _factory("zoo_resnet", "resnet_50", IMAGE),
        "resnext_50": _factory("zoo_resnet", "resnext_50", IMAGE),
        "squeezenet": _factory("zoo_small", "squeezenet", IMAGE),
        "vgg_16": _factory("zoo_small", "vgg_16", IMAGE),
    }
)
