"""What changes in a site's local loop, and what a rule may ask for beyond the loop's hooks.

A rule is called by the local loop of `cluster/`, or by a script around its own: `begin` once the base weights are in
the model, `before_step` when gradients are there, `after_step` after the optimizer has moved, `end` after the last
step. One rule object serves one worker and holds what it needs between `begin` and `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.aggregation.lanes import Lane
from atoll.wire.job import Strict


class LocalRule(Protocol):
    @property
    def name(self) -> str: ...

    def begin(self, model: nn.Module) -> None: ...

    def before_step(self, model: nn.Module) -> None: ...

    def after_step(self, model: nn.Module) -> None: ...

    def end(self, model: nn.Module) -> None: ...


@runtime_checkable
class Paired(Protocol):
    """A rule with a part at each site and a part at the server, which an update moves both or not at all.

    Around the hooks: `resume` before `begin`; after `end` `differences`, then `settle` once the update is written.
    """

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What travels for it beside the model; () where the server knows its part from the parameters."""
        ...

    def resume(self, kept: Mapping[str, Tensor], lanes: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up what a round begins with.

        Args:
            kept: what `settle` gave in the last round whose version holds this site's update; nothing before that.
            lanes: the server's value of each control lane, by lane and then by parameter.
        """
        ...

    def differences(self) -> Mapping[str, Tensor]:
        """What the update says of these tensors of the manifest, in place of trained minus base; all of its lanes'."""
        ...

    def settle(self, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the site keeps if the update comes to count; `sent` are its differences as the codec left them."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A rule that depends on which optimizer makes the local steps."""

    def watch(self, optimizer: Optimizer) -> None:
        """The optimizer of the steps to come, before `begin`.

        Raises:
            AppFailed: the rule is not defined for it; names its setting and what is.
        """
        ...


def has_part(rule: LocalRule) -> TypeGuard[Paired]:
    """Whether a rule is `Paired`; asked in every round of every site, and `isinstance` takes 20 us to look at a protocol."""
    return hasattr(rule, "settle") and hasattr(rule, "resume")


def show(rule: LocalRule, optimizer: Optimizer) -> None:
    """Shows a rule that is `Watching` the optimizer of the steps to come. Raises AppFailed as it does."""
    watch: Callable[[Optimizer], None] | None = getattr(rule, "watch", None)
    if watch is not None:
        watch(optimizer)


def lanes_of(rule: LocalRule) -> tuple[Lane, ...]:
    """What travels for a rule beside the model."""
    return rule.lanes if isinstance(rule, Paired) else ()


class NoRule:
    """The app's own loop, unchanged."""

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name = "none"

    def begin(self, model: nn.Module) -> None:
        pass

    def before_step(self, model: nn.Module) -> None:
        pass

    def after_step(self, model: nn.Module) -> None:
        pass

    def end(self, model: nn.Module) -> None:
        pass
