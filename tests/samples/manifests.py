"""Manifests drawn at random, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from atoll.wire.manifest import DTYPE_BYTES, Entry, Manifest, Role

_ROLES: tuple[Role, ...] = ("parameter", "buffer")

names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=24).filter(
    lambda name: name != "__metadata__"  # the one that safetensors keeps for itself
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def entries(draw: st.DrawFn, max_tensors: int = 8) -> list[Entry]:
    """Entries for `Manifest.build`: any dtype, small shapes (scalars and empty ones too), unique names."""
    chosen = draw(st.lists(names, unique=True, max_size=max_tensors))
    return [
        (name, draw(st.sampled_from(sorted(DTYPE_BYTES))), draw(shapes), draw(st.sampled_from(_ROLES)))
        for name in chosen
    ]


manifests = entries().map(Manifest.build)
