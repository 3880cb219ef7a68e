"""ResNet-18, ResNet-50 (He et al. 2015, the v1.5 stride placement) and ResNeXt-50 32x4d (Xie et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution with "same" padding and its BatchNorm, as layers of a Sequential."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`, shape (1, inputs, H, W) → (1, outputs, H/stride, W/stride)."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.relu(self.body(x) + self.shortcut(x))


def basic_block(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions; outputs = width."""
    body = nn.Sequential(*conv_bn(inputs, width, 3, stride), nn.ReLU(), *conv_bn(width, width, 3))
    return Residual(body, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int, groups: int = 1, group_width: int = 64) -> Residual:
    """1x1 → 3x3 (grouped) → 1x1; outputs = 4 * width."""
    inner = width * group_width // 64 * groups
    body = nn.Sequential(
        *conv_bn(inputs, inner, 1),
        nn.ReLU(),
        *conv_bn(inner, inner, 3, stride, groups),
        nn.ReLU(),
        *conv_bn(inner, 4 * width, 1),
    )
    return Residual(body, inputs, 4 * width, stride)


class ResNet(nn.Module):
    """Stem, four stages, average pooling and a linear layer: (1, 3, 224, 224) → (1, 1000).

    Args:
        depths: blocks per stage.
        expansion: 1 for basic blocks, 4 for bottlenecks.
        groups: groups of the 3x3 convolutions (ResNeXt: 32).
        group_width: width per group at 64 channels (ResNeXt-50: 4).
    """

    def __init__(self, depths: Sequence[int], expansion: int, groups: int = 1, group_width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                if expansion == 1:
                    stages.append(basic_block(channels, width, stride))
                else:
                    stages.append(bottleneck(channels, width, stride, groups, group_width))
                channels = width * expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.stages(self.stem(x))
        out: torch.Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


def resnet_18() -> nn.Module:
    """ResNet-18."""
    return ResNet((2, 2, 2, 2), 1)


def resnet_50() -> nn.Module:
    """ResNet-50."""
    return ResNet((3, 4, 6, 3), 4)


def resnext_50() -> nn.Module:
    """ResNeXt-50 32x4d."""
    return ResNet((3, 4, 6, 3), 4, groups=32, group_width=4)
