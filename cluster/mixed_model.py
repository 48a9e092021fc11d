"""The model that a site has of its own in a run of gossip: mixed from files, and written whole for its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from atoll.aggregation.encode import require_finite
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.mixing import Share, mix
from atoll.cluster.messages import Part
from atoll.wire.model_file import ModelFile, map_file
from atoll.wire.tensors import write_state

CONSENSUS = "consensus_distance"  # metric: mean over sites of the squared distance to the version, not its root


def mixed_model(layout: UpdateLayout, parts: Sequence[Part]) -> ModelFile:
    """The mixture of these models, in memory.

    Raises:
        BadUpdate, BadManifest: a model cannot be mixed; the first names its site.
        LocalError: a file is not there.
    """
    data = bytearray(layout.manifest.num_bytes)
    with ExitStack() as files:
        shares = [
            Share(site=part.site, weight=part.weight, model=files.enter_context(map_file(Path(part.path))))
            for part in parts
        ]
        mix(layout, shares, data)
        del shares
    view = memoryview(data).toreadonly()
    return ModelFile(manifest=layout.manifest, data_offset=0, num_bytes=len(data), map=view, metadata={})


def write_model(layout: UpdateLayout, tensors: Mapping[str, Tensor], out: memoryview) -> None:
    """Writes a trained model as its neighbours take it.

    Raises:
        BadUpdate: a value is not finite; names the tensor.
        BadManifest: training has changed what the model is made of.
    """
    for spec in layout.manifest:
        tensor = tensors.get(spec.name)
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            require_finite(spec, tensor)
    write_state(layout.manifest, tensors, out)
