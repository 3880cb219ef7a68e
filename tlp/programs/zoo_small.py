"""Networks that widen the training set: VGG-16, SqueezeNet 1.1, the DCGAN generator, a multi-layer perceptron."""

from __future__ import annotations

import torch
from torch import nn

from tlp.programs.zoo_resnet import conv_bn


def vgg_16() -> nn.Module:
    """VGG-16 with BatchNorm (Simonyan & Zisserman 2014): (1, 3, 224, 224) → (1, 1000)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [*conv_bn(channels, width, 3), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class Fire(nn.Module):
    """1x1 squeeze, then 1x1 and 3x3 expansions side by side: (1, inputs, H, W) → (1, 2 * expand, H, W)."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.expand1(x)), torch.relu(self.expand3(x))], 1)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1 (Iandola et al. 2016): (1, 3, 224, 224) → (1, 1000)."""

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool()),
        *(Fire(64, 16, 64), Fire(128, 16, 64), pool()),
        *(Fire(128, 32, 128), Fire(256, 32, 128), pool()),
        *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        *(nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def dcgan() -> nn.Module:
    """DCGAN generator (Radford et al. 2015): noise (1, 100) → image (1, 3, 64, 64)."""
    layers: list[nn.Module] = [nn.Linear(100, 512 * 4 * 4), nn.ReLU(), nn.Unflatten(1, (512, 4, 4))]
    for inputs, outputs in ((512, 256), (256, 128), (128, 64)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())


def mlp() -> nn.Module:
    """Perceptron with two hidden layers of 512: (1, 784) → (1, 10)."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
