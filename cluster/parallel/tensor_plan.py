"""Tensor parallelism's plan: which linear module is divided along which dim, by the model's names.

Column-wise divides the outputs, row-wise the inputs, whose results are then summed: a pair of both costs one exchange
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3). What no pattern names is whole on every rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from atoll.cluster.app import App
from atoll.wire.errors import AppFailed, ConfigError
from atoll.wire.parallel_section import ParallelSection

# Names of linear modules within a block, as published models have them: those before and those after the nonlinearity.
_Pairs = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
_FEED_FORWARD: _Pairs = (
    (("w1", "w3"), ("w2",)),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("linear1",), ("linear2",)),  # of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
)
_ATTENTION: _Pairs = (
    (("wq", "wk", "wv"), ("wo",)),
    (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    (("q_proj", "k_proj", "v_proj"), ("out_proj",)),
)
_HEADS = ("n_heads", "num_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_local_heads", "n_head")


def divide(app: App, model: nn.Module, mesh: DeviceMesh, section: ParallelSection) -> None:
    """Divides the model's linear modules along the mesh's one axis, in place.

    Raises:
        ConfigError: a pattern matches no linear module, or the automatic plan finds nothing to divide.
        AppFailed: a size, or a number of heads, is no multiple of the axis; or the app has no plan.
    """
    if section.tp_plan == "app":
        plan = dict(app.tensor_plan(model))
    elif section.tp_plan == "auto":
        plan = _automatic(model, mesh.size())
    else:
        plan = _by_pattern(model, section.tp_plan)
    for name, style in plan.items():
        _require_divisible(model, name, style, mesh.size())
    parallelize_module(model, mesh, plan)
    # The fused kernels of nn.TransformerEncoderLayer in evaluation take whole tensors only.
    torch.backends.mha.set_fastpath_enabled(False)


def _by_pattern(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """The style of the first pattern that matches, for each linear module that one matches."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    for pattern in patterns:
        if not fnmatch.filter(linears, pattern):
            raise ConfigError(
                f"parallel.tp_plan: {pattern!r} matches no linear module or embedding of the model, whose are "
                f"{', '.join(linears[:8])}",
                key="parallel.tp_plan",
                value=pattern,
            )
    plan: dict[str, ParallelStyle] = {}
    for name in linears:
        kind = next((kind for pattern, kind in patterns.items() if fnmatch.fnmatchcase(name, pattern)), "replicate")
        if kind != "replicate":
            plan[name] = ColwiseParallel() if kind == "colwise" else RowwiseParallel()
    return plan


def _automatic(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Pairs of linear modules with known names. nn.MultiheadAttention, whose projection is packed, stays whole."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for first, second in _FEED_FORWARD:
            plan |= _pair(name, children, first, second)
        for first, second in _ATTENTION:
            if pair := _pair(name, children, first, second):
                _divide_heads(name, module, size)
                plan |= pair
    if not plan:
        raise ConfigError(
            'parallel.tp_plan = "auto" knows no module of this model; name them, such as '
            '{ "layers.*.up" = "colwise", "layers.*.down" = "rowwise" }, or write tensor_plan() in the app',
            key="parallel.tp_plan",
            value="auto",
        )
    return plan


def _pair(
    owner: str, children: Mapping[str, nn.Module], first: tuple[str, ...], second: tuple[str, ...]
) -> dict[str, ParallelStyle]:
    if not all(isinstance(children.get(name), nn.Linear) for name in (*first, *second)):
        return {}
    prefix = f"{owner}." if owner else ""
    return {
        **{prefix + name: ColwiseParallel() for name in first},
        **{prefix + name: RowwiseParallel() for name in second},
    }


def _divide_heads(name: str, module: nn.Module, size: int) -> None:
    """Each rank computes whole heads, so that the module's own counts of them are those of one rank."""
    for attribute in _HEADS:
        count = getattr(module, attribute, None)
        if isinstance(count, int) and not isinstance(count, bool):
            if count % size:
                raise AppFailed(
                    f"{name}.{attribute} = {count} is no multiple of tp = {size}; choose tp so that it divides the heads",
                    field="parallel.tp",
                    value=size,
                    bound=f"a divisor of {count}",
                )
            setattr(module, attribute, count // size)


def _require_divisible(model: nn.Module, name: str, style: ParallelStyle, size: int) -> None:
    """A rank with an empty or shorter part would compute another shape than the model's code expects."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        return
    length = module.in_features if isinstance(style, RowwiseParallel) else module.out_features
    if length % size:
        raise AppFailed(
            f"{name} has {length} features along the dim that tp = {size} divides; choose a tp that divides it",
            field="parallel.tp",
            value=size,
            bound=f"a divisor of {length}",
        )
