"""BatchNorm folded into the convolution or linear layer before it, so that a fused subgraph is conv + bias + ReLU."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger(__name__)

# What folding may move an output by, relative to its largest value: float32 rounding through some fifty layers.
TOLERANCE = 1e-3


def fold_batch_norm(module: nn.Module, example_args: tuple[torch.Tensor, ...]) -> nn.Module:
    """`module` with every BatchNorm folded that directly follows a convolution or linear layer.

    Where `torch.fx` cannot trace a module, its children are tried one by one, so one untraceable forward does not keep
    the rest from being folded. If the outputs for `example_args` differ by more than `TOLERANCE` afterwards, the module
    is returned unfolded. The argument, in eval mode, is not changed.
    """
    import torch

    if not _has_norm(module):
        return module
    folded = _fold(copy.deepcopy(module))
    with torch.no_grad():
        expected, folded_outputs = _tensors(module(*example_args)), _tensors(folded(*example_args))
    for a, b in zip(expected, folded_outputs, strict=True):
        limit = TOLERANCE * max(float(a.abs().max()), 1e-6)
        if not float((a - b).abs().max()) <= limit:
            log.warning("BatchNorm was not folded: the outputs would differ by more than %.3g", limit)
            return module
    return folded


def _tensors(output: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _fold(module: nn.Module) -> nn.Module:
    """Fold in place where possible; returns the module to use instead."""
    import torch

    if not _has_norm(module):
        return module
    try:
        graph = torch.fx.symbolic_trace(module)
    # Tracing runs the module's own forward on proxies, so anything may be raised; then its children are tried.
    except Exception as exc:  # noqa: BLE001
        log.debug("torch.fx cannot trace %s: %s", type(module).__name__, exc)
        for name, child in list(module.named_children()):
            setattr(module, name, _fold(child))
        return module
    _fold_graph(graph)
    return graph.eval()


def _fold_graph(graph: torch.fx.GraphModule) -> None:
    from torch import nn
    from torch.nn.utils import fusion

    modules: dict[str, Any] = dict(graph.named_modules())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    for node in list(graph.graph.nodes):
        norm: Any = modules.get(str(node.target)) if node.op == "call_module" else None
        if not _is_norm(norm) or not node.args:
            continue
        source = node.args[0]
        layer: Any = modules.get(str(source.target)) if getattr(source, "op", "") == "call_module" else None
        # A layer or norm called twice has one set of weights for both places and cannot take up the norm of one.
        if len(source.users) > 1 or called.count(str(source.target)) > 1 or called.count(str(node.target)) > 1:
            continue
        # fuse_conv_bn_eval is wrong for grouped transposed convolutions: their weight's output axis is per group.
        is_conv = isinstance(layer, nn.modules.conv._ConvNd)
        if is_conv and (not layer.transposed or layer.groups == 1):
            fused = fusion.fuse_conv_bn_eval(layer, norm, transpose=layer.transposed)
        elif isinstance(layer, nn.Linear):
            fused = fusion.fuse_linear_bn_eval(layer, norm)
        else:
            continue
        parent, _, name = str(source.target).rpartition(".")
        setattr(graph.get_submodule(parent), name, fused)
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()


def _has_norm(module: nn.Module) -> bool:
    from torch import nn

    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def _is_norm(module: Any) -> bool:
    from torch import nn

    # Without running statistics a norm depends on its input and cannot be folded.
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(module, kinds) and module.running_mean is not None and not module.training
