"""MobileNet-V2 (Sandler et al. 2018)."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from tlp.programs.zoo_resnet import conv_bn

# (expansion, output channels, blocks, stride of the first): table 2 of the paper.
STAGES: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1x1 expansion → depthwise 3x3 → linear 1x1, with a shortcut where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*conv_bn(inputs, inner, 1), nn.ReLU6()]
        layers += [*conv_bn(inner, inner, 3, stride, groups=inner), nn.ReLU6(), *conv_bn(inner, outputs, 1)]
        self.body = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, inputs, H, W) → (1, outputs, H/stride, W/stride)."""
        out: torch.Tensor = self.body(x)
        return x + out if self.shortcut else out


class MobileNetV2(nn.Module):
    """(1, 3, 224, 224) → (1, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv_bn(3, 32, 3, 2), nn.ReLU6()]
        channels = 32
        for expansion, outputs, blocks, stride in STAGES:
            for index in range(blocks):
                layers.append(InvertedResidual(channels, outputs, stride if index == 0 else 1, expansion))
                channels = outputs
        layers += [*conv_bn(channels, 1280, 1), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out: torch.Tensor = self.head(nn.functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
        return out


def mobilenet_v2() -> nn.Module:
    """MobileNet-V2, width 1.0."""
    return MobileNetV2()
