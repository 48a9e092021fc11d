"""A model without values where that can be: they come from the version that a round begins with, slice by slice."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from atoll.cluster.app import App, build_model

_log = logging.getLogger("atoll.worker")


def build_skeleton(app: App, job_seed: int, *, needs_values: bool = False) -> nn.Module:
    """The app's model on the meta device; whole and on the CPU where it holds values that no version carries.

    Such are non-persistent buffers, tensors that are plain attributes, and whatever model() computes from values. Tied
    parameters count among them, since torch's `to_empty` would make two of each.
    """
    if not needs_values:
        try:
            with torch.device("meta"):
                model = app.model()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may read a value; below there are some
            _log.info("model() needs values (%s): each process builds it whole before it keeps its part", error)
        else:
            if isinstance(model, nn.Module) and not _keeps_values(model):
                return model
    return build_model(app, job_seed)


def _keeps_values(model: nn.Module) -> bool:
    """Whether anything but the state dict would be without values; or has them, since model() asked for a device."""
    persistent = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        return True
    if any(id(tensor) not in persistent or not tensor.is_meta for tensor in tensors):
        return True
    return any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())
