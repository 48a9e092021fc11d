"""What a worker is to write of an update for a session: its levels under the masks of this site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.client.private_update import Facts
from atoll.cluster.messages import Mask, MaskKey
from atoll.privacy.secagg import keys
from atoll.privacy.secagg.agreement import Terms, counters


def mask_order(
    key: str, terms: Terms, site: str, update: Facts, masks: Sequence[Sequence[keys.Mask]], *, private: Path, out: Path
) -> Mask:
    """The order for a session's masked input.

    Args:
        key: names task, attempt and session.
        masks: those of each lane (`site.masks`).
        private: the file with the update; `out` is the one that the worker makes.

    Raises:
        BadUpdate: weight or a metric is out of the session's bounds.
    """
    exact, reals = masks
    return Mask(
        key=key,
        round=update.round,
        private_path=str(private),
        out_path=str(out),
        exact=counters(terms, update.weight, update.metrics, site=site),
        exact_masks=_keys(exact),
        masks=_keys(reals),
        bits=terms.bits,
        scale=terms.scale,
        share=update.weight / terms.max_weight,
        num_sites=terms.num_sites,
        bound=terms.section.bound,
        max_clipped=terms.max_clipped,
        staleness=terms.opening.staleness(site),
    )


def _keys(lane: Sequence[keys.Mask]) -> list[MaskKey]:
    return [MaskKey(key_hex=mask.key.hex(), negative=mask.negative) for mask in lane]
