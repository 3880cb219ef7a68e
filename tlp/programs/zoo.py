"""Networks in plain torch, so that extracting tasks needs no torchvision and no download.

`BUILTIN` maps a name to its network; `make(name)` returns `(module, example_args)`: batch 1, float32, eval mode.
Weights are random under a fixed seed (`SEED`): latency does not depend on their values, and a deployed library must be
comparable with torch. Convolutional networks are written as conv → BatchNorm → activation, so that
`folding.fold_batch_norm` can fold every BatchNorm. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

SEED: Final = 0
IMAGE: Final = (1, 3, 224, 224)
SEQUENCE: Final = 128  # tokens; BERT's usual length for latency figures
VOCABULARY: Final = 30522
CLASSES: Final = 1000


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution with "same" padding and its BatchNorm, as layers of a Sequential."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Classifier(nn.Module):
    """`head(mean over pixels of features(x))`: (1, 3, 224, 224) → (1, 1000)."""

    def __init__(self, features: nn.Module, channels: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        out: torch.Tensor = self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
        return out


# -- ResNet-18, ResNet-50 (He et al. 2015, the v1.5 stride placement) and ResNeXt-50 32x4d (Xie et al. 2017) -----------
class Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`: (1, inputs, H, W) → (1, outputs, H/stride, W/stride)."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        return torch.relu(self.body(x) + self.shortcut(x))


def basic_block(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions; outputs = width."""
    body = nn.Sequential(*conv_bn(inputs, width, 3, stride), nn.ReLU(), *conv_bn(width, width, 3))
    return Residual(body, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int, groups: int = 1, group_width: int = 64) -> Residual:
    """1x1 → 3x3 (grouped) → 1x1; outputs = 4 * width."""
    inner = width * group_width // 64 * groups
    body = nn.Sequential(
        *(*conv_bn(inputs, inner, 1), nn.ReLU()),
        *(*conv_bn(inner, inner, 3, stride, groups), nn.ReLU()),
        *conv_bn(inner, 4 * width, 1),
    )
    return Residual(body, inputs, 4 * width, stride)


def resnet(depths: Sequence[int], block: Callable[[int, int, int], Residual], expansion: int) -> nn.Module:
    """Stem, four stages, average pooling and a linear layer.

    Args:
        depths: blocks per stage.
        block: (inputs, width, stride) → block.
        expansion: outputs of a block over its width.
    """
    layers: list[nn.Module] = [*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            layers.append(block(channels, width, 2 if stage > 0 and index == 0 else 1))
            channels = width * expansion
    return Classifier(nn.Sequential(*layers), channels)


# -- MobileNet-V2 (Sandler et al. 2018) --------------------------------------------------------------------------------
# (expansion, output channels, blocks, stride of the first): table 2 of the paper.
_STAGES: Final = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
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


def mobilenet_v2() -> nn.Module:
    """Width 1.0."""
    layers: list[nn.Module] = [*conv_bn(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expansion, outputs, blocks, stride in _STAGES:
        for index in range(blocks):
            layers.append(InvertedResidual(channels, outputs, stride if index == 0 else 1, expansion))
            channels = outputs
    return Classifier(nn.Sequential(*layers, *conv_bn(channels, 1280, 1), nn.ReLU6()), 1280)


# -- BERT encoders (Devlin et al. 2018; the tiny size is from Turc et al. 2019) ----------------------------------------
class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and LayerNorm after it: (1, S, H) → (1, S, H)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)
        self.norm_attention = nn.LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm_output = nn.LayerNorm(hidden, eps=1e-12)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        return x.reshape(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        # Written out, not scaled_dot_product_attention: both products and the softmax become tasks of their own.
        scores = torch.matmul(query, key.transpose(-1, -2)) / (query.shape[-1] ** 0.5)
        context = torch.matmul(torch.softmax(scores, -1), value).transpose(1, 2).reshape(x.shape)
        x = self.norm_attention(x + self.output(context))
        out: torch.Tensor = self.norm_output(x + self.down(F.gelu(self.up(x))))
        return out


class Bert(nn.Module):
    """Token ids (1, S) int64 → last hidden state (1, S, hidden) float32."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, hidden))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*(EncoderLayer(hidden, heads) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        out: torch.Tensor = self.layers(self.norm(self.tokens(ids) + self.positions))
        return out


# -- networks that widen the training set ------------------------------------------------------------------------------
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
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


class Fire(nn.Module):
    """1x1 squeeze, then 1x1 and 3x3 expansions side by side: (1, inputs, H, W) → (1, 2 * expand, H, W)."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.expand1(x)), torch.relu(self.expand3(x))], 1)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1 (Iandola et al. 2016): (1, 3, 224, 224) → (1, 1000)."""
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool()),
        *(Fire(64, 16, 64), Fire(128, 16, 64), pool()),
        *(Fire(128, 32, 128), Fire(256, 32, 128), pool()),
        *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        *(nn.Conv2d(512, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
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


# -- the table ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Builtin:
    """How to make a network and its example input: token ids below `vocabulary` if that is given, else noise."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE
    vocabulary: int = 0


BUILTIN: Final[Mapping[str, Builtin]] = {
    "bert_base": Builtin(partial(Bert, 12, 768, 12), (1, SEQUENCE), VOCABULARY),
    "bert_tiny": Builtin(partial(Bert, 2, 128, 2), (1, SEQUENCE), VOCABULARY),
    "dcgan": Builtin(dcgan, (1, 100)),
    "mlp": Builtin(mlp, (1, 784)),
    "mobilenet_v2": Builtin(mobilenet_v2),
    "resnet_18": Builtin(partial(resnet, (2, 2, 2, 2), basic_block, 1)),
    "resnet_50": Builtin(partial(resnet, (3, 4, 6, 3), bottleneck, 4)),
    "resnext_50": Builtin(partial(resnet, (3, 4, 6, 3), partial(bottleneck, groups=32, group_width=4), 4)),
    "squeezenet": Builtin(squeezenet),
    "vgg_16": Builtin(vgg_16),
}


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The network of a name in `BUILTIN`, and example arguments of its `forward`."""
    builtin = BUILTIN[name]
    # fork_rng: asking for a network must not move the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = builtin.build()
        tokens = builtin.vocabulary
        example = torch.randint(0, tokens, builtin.shape) if tokens else torch.randn(builtin.shape)
    return network.eval(), (example,)
