"""The repeated parts of a model: what is sharded, recomputed, compiled and handed from stage to stage as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_LISTS = (nn.ModuleList, nn.Sequential)
_KEPT_OPS = (  # products, which cost most to do again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks by name, in order: the members of its lists of modules that hold parameters.

    Of lists within lists the outermost count. A model without any has its children, and one without children none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, _LISTS)]
    outer = [(name, module) for name, module in lists if not any(_within(name, other) for other, _ in lists)]
    owners: list[tuple[str, nn.Module]] = [(name, module) for name, module in outer if len(_members(module)) > 1]
    owners = owners or [("", model)]
    return {f"{owner}.{name}" if owner else name: child for owner, module in owners for name, child in _members(module)}


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters())
    ]


def _within(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def recompute(blocks: dict[str, nn.Module], kind: str) -> None:
    """Have each block keep no activations ("full"), or only those of products ("selective"). Names stay as they are."""
    for block in blocks.values():
        if kind == "full":
            checkpoint(block)
        elif kind == "selective":
            checkpoint(block, context_fn=_selective)


def compile_blocks(blocks: dict[str, nn.Module], backend: str) -> None:
    """Compile each block in place, so that equal ones share their code and names stay as they are."""
    for block in blocks.values():
        block.compile(backend=backend)


def _selective() -> tuple[Callable[..., object], Callable[..., object]]:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call,no-any-return]


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
