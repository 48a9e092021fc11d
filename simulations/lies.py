"""What sites that lie train with, and what they send.

A lie about data is told in the batches of a site's training, so that loader, evaluation and personal models see the
data as it is. A lie about an update is told in its bytes: they are decoded as the server decodes them, changed, and
encoded again with the site's own secret of rounding. A liar stays within the bound of the sum, since an update beyond
it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from atoll.aggregation.encode import encode_tensor
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rounding import Rounding
from atoll.aggregation.sent import Sent
from atoll.cluster.app import App
from atoll.cluster.seeds import training_seed
from atoll.simulations.faults import Backdoor, Fault, Faults, FreeRide, LabelFlip, Noise, Scale, SignFlip
from atoll.simulations.sites import Sites
from atoll.wire.errors import AppFailed
from atoll.wire.tensors import DTYPES

AboutData = LabelFlip | Backdoor
AboutUpdates = SignFlip | Scale | Noise | FreeRide | Backdoor


class LyingSites:
    """Sites of which some train with other batches than they have, in the rounds that the faults say."""

    def __init__(self, sites: Sites, faults: Faults, job_seed: int, num_rounds: int) -> None:
        self.names = sites.names
        self._sites = sites
        self._lies = _by_training(faults, sites.names, job_seed, num_rounds)
        self._apps: dict[int, App] = {}  # by id of the one that it is made of

    def app(self, site: str) -> App:
        app = self._sites.app(site)
        if id(app) not in self._apps:
            self._apps[id(app)] = _lying(app, self._lies)
        return self._apps[id(app)]

    def data(self, site: str, split: str) -> Dataset[Any] | None:
        return self._sites.data(site, split)

    def server_data(self) -> Dataset[Any] | None:
        return self._sites.server_data()


_Lies = Mapping[int, tuple[str, Sequence[AboutData]]]  # site and lies, by the seed of a training


def _by_training(faults: Faults, names: Sequence[str], job_seed: int, num_rounds: int) -> _Lies:
    """Each training of each site has a seed of its own, which its loader is given: that tells who trains, and when."""
    found: dict[int, tuple[str, Sequence[AboutData]]] = {}
    for site in names:
        if not any(isinstance(fault, AboutData) for fault in faults.ever(site)):
            continue
        for round_ in range(1, num_rounds + 1):
            lies = [fault for fault in faults.of(site, round_) if isinstance(fault, AboutData)]
            if lies:
                found[training_seed(job_seed, site, round_)] = (site, lies)
    return found


class _Lying(App):
    """Goes before the class of an app, whose loader it changes."""

    _lies: _Lies

    def loader(
        self, dataset: Dataset[Any], *, batch_size: int, shuffle: bool, generator: torch.Generator
    ) -> Iterable[Any]:
        batches = super().loader(dataset, batch_size=batch_size, shuffle=shuffle, generator=generator)
        if (found := self._lies.get(generator.initial_seed())) is None:
            return batches
        return _altered(batches, *found, generator.initial_seed())


def _lying(app: App, lies: _Lies) -> App:
    kind = type(type(app).__name__, (_Lying, type(app)), {})
    made: App = object.__new__(kind)
    vars(made).update(vars(app), _lies=lies)
    return made


def _altered(batches: Iterable[Any], site: str, lies: Sequence[AboutData], seed: int) -> Iterator[Any]:
    draw = torch.Generator().manual_seed(seed ^ 0x6C6965)  # another one than that of the order of the data
    for batch in batches:
        for lie in lies:
            batch = (
                _flipped(batch, site, lie, draw) if isinstance(lie, LabelFlip) else _poisoned(batch, site, lie, draw)
            )
        yield batch


def _flipped(batch: Any, site: str, lie: LabelFlip, draw: torch.Generator) -> Any:
    labels_B = _labels(batch, site, lie)
    if labels_B.numel() and not 0 <= int(labels_B.min()) <= int(labels_B.max()) < lie.classes:
        highest = int(labels_B.max())
        text = f"label_flip at {site}: a label is {highest}, and classes = {lie.classes} says 0 to {lie.classes - 1}"
        raise AppFailed(text, site=site, field="fault.classes", value=highest)
    hit_B = torch.rand(len(labels_B), generator=draw) < lie.fraction
    return (*batch[:-1], torch.where(hit_B.to(labels_B.device), lie.classes - 1 - labels_B, labels_B))


def _poisoned(batch: Any, site: str, lie: Backdoor, draw: torch.Generator) -> Any:
    labels_B = _labels(batch, site, lie)
    hit_B = torch.rand(len(labels_B), generator=draw) < lie.fraction
    inputs = with_trigger(batch[0], lie, hit_B, site)
    return (inputs, *batch[1:-1], torch.where(hit_B.to(labels_B.device), lie.target, labels_B))


def with_trigger(inputs: Tensor, lie: Backdoor, hit_B: Tensor, site: str = "") -> Tensor:
    """A copy of a batch of inputs, shape (B, ...), with the trigger in those that `hit_B` says.

    Raises:
        AppFailed: an input has fewer values than the trigger names.
    """
    flat_BF = inputs.reshape(len(inputs), -1).clone()
    if max(lie.features) >= flat_BF.shape[1]:
        text = f"backdoor at {site}: features names {max(lie.features)}, and an input has {flat_BF.shape[1]} values"
        raise AppFailed(text, site=site, field="fault.features", value=max(lie.features))
    hit_B = hit_B.to(flat_BF.device)
    for place in lie.features:
        flat_BF[hit_B, place] = lie.value
    return flat_BF.reshape(inputs.shape)


def triggered(dataset: TensorDataset, lie: Backdoor) -> TensorDataset:
    """The examples of other classes than the target's, with the trigger in them and the target as their label.

    A model's accuracy on them is the attacker's success. Raises AppFailed as `with_trigger`.
    """
    others = dataset.tensors[-1] != lie.target
    inputs = dataset.tensors[0][others]
    changed = with_trigger(inputs, lie, torch.ones(len(inputs), dtype=torch.bool))
    return TensorDataset(changed, torch.full((len(inputs),), lie.target))


def _labels(batch: Any, site: str, lie: AboutData) -> Tensor:
    labels = batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        text = f"{lie.kind} at {site}: the app's batches do not end with a tensor of classes, one for each example"
        raise AppFailed(text, site=site, field="fault.kind", value=lie.kind)
    return labels


def lie_about(
    update: memoryview,
    lies: Sequence[Fault],
    layout: UpdateLayout,
    *,
    rounding: Rounding,
    bound: float,
    seed: bytes,
) -> memoryview:
    """The update that a site sends in place of an honest one; the same where none of the lies is about updates.

    Args:
        bound: largest magnitude of a difference.
        seed: of noise; another one for each site and round.
    """
    told = [
        lie for lie in lies if isinstance(lie, AboutUpdates) and not (isinstance(lie, Backdoor) and lie.strength == 1)
    ]
    if not told:
        return update
    out, sent = bytearray(update), Sent(layout, update)
    draw = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(b"atoll/lie/1" + seed).digest()[:8]) >> 1)
    for entry in layout.means:
        difference = sent[entry.spec.name]
        for lie in told:
            difference = _CHANGED[type(lie)](difference, lie, draw)
        limit = min(bound, entry.encoding.limit) / entry.encoding.gain
        new = _within(difference, limit).to(DTYPES[entry.spec.dtype])
        encode_tensor(entry, {}, {entry.spec.name: new}, out, rounding=rounding, bound=bound, whole=False)
    return memoryview(out).toreadonly()


def _noise_like(tensor: Tensor, deviation: float, draw: torch.Generator) -> Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    noise = deviation * torch.randn(values.shape, generator=draw, dtype=values.dtype)
    return torch.view_as_complex(noise) if tensor.is_complex() else noise


_CHANGED: Mapping[type[Fault], Callable[[Tensor, Any, torch.Generator], Tensor]] = {
    SignFlip: lambda difference, lie, draw: -lie.strength * difference,
    Scale: lambda difference, lie, draw: lie.strength * difference,
    Backdoor: lambda difference, lie, draw: lie.strength * difference,
    Noise: lambda difference, lie, draw: difference + _noise_like(difference, lie.deviation, draw),
    FreeRide: lambda difference, lie, draw: _noise_like(difference, lie.deviation, draw),
}


def _within(tensor: Tensor, limit: float) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor).clamp(-limit, limit))
    return tensor.clamp(-limit, limit)
