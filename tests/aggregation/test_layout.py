from __future__ import annotations

import pytest
from contracts.updates import CODECS, EVERY_DTYPE, SMALL, codec, layout_of

from atoll.aggregation.layout import HEADER_BYTES, MeanEntry, RawEntry, update_layout
from atoll.wire.errors import ConfigError
from atoll.wire.manifest import Manifest


def test_regions_follow_one_another_in_manifest_order_and_are_aligned() -> None:
    for name in CODECS:
        layout = layout_of(EVERY_DTYPE, name)
        order = {spec.name: place for place, spec in enumerate(layout.manifest)}
        entries: list[MeanEntry | RawEntry] = [*layout.means, *layout.raws]
        entries.sort(key=lambda entry: order[entry.spec.name])
        end = HEADER_BYTES
        for entry in entries:
            assert 0 <= entry.offset - end < 16
            end = entry.offset + entry.num_bytes
        assert end == layout.num_bytes
        assert all(entry.offset % entry.encoding.alignment == 0 for entry in layout.means)


@pytest.mark.parametrize(
    ("buffers", "means", "raws", "absent"),
    [
        (
            "mean",
            {"conv.weight", "conv.bias", "norm.running_mean", "head.weight", "half", "gate", "nothing"},
            {"norm.num_batches_tracked": "max", "mask": "max"},
            set(),
        ),
        (
            "local",
            {"conv.weight", "conv.bias", "head.weight", "half", "gate", "nothing"},
            {},
            {"norm.running_mean", "norm.num_batches_tracked", "mask"},
        ),
        (
            "first",
            {"conv.weight", "conv.bias", "head.weight", "half", "gate", "nothing"},
            {"norm.running_mean": "first", "norm.num_batches_tracked": "first", "mask": "first"},
            set(),
        ),
    ],
)
def test_buffers_follow_the_policy(buffers: str, means: set[str], raws: dict[str, str], absent: set[str]) -> None:
    layout = layout_of(SMALL, buffers=buffers)  # type: ignore[arg-type]
    assert {entry.spec.name for entry in layout.means} == means
    assert {entry.spec.name: entry.choice for entry in layout.raws} == raws
    assert {spec.name for spec in layout.absent} == absent


def test_dtypes_without_a_maximum_are_taken_from_the_first_site() -> None:
    choices = {entry.spec.dtype: entry.choice for entry in layout_of(EVERY_DTYPE).raws}
    assert choices["float8_e8m0fnu"] == choices["float4_e2m1fn_x2"] == "first"
    assert choices["uint64"] == choices["bool"] == "max"


def test_small_neighbours_are_read_as_one_segment() -> None:
    entries = [(f"layer{n}", "float32", (3,), "parameter") for n in range(1000)]
    layout = update_layout(Manifest.build(entries), codec("native"), "mean")  # type: ignore[arg-type]
    assert [(segment.index, segment.num_values) for segment in layout.segments] == [(0, 3000)]
    assert len(update_layout(layout.manifest, codec("int8"), "mean").segments) == 1000


def test_segments_cover_the_flat_vector_and_its_second_limbs() -> None:
    for name in CODECS:
        layout = layout_of(EVERY_DTYPE, name)
        index = low = 0
        for segment in layout.segments:
            assert segment.index == index
            index += segment.num_values
            if segment.encoding.two_limbs:
                assert segment.low_index == low
                low += segment.num_values
        assert (index, low) == (layout.num_values, layout.num_low_values)
        assert (low > 0) == (name in ("native", "top_k", "random_k"))  # the sparse ones send statistics as they are


def test_the_header_tells_layouts_apart() -> None:
    manifests = [SMALL, SMALL[:3], [*SMALL[:-1], ("mask", "bool", (9,), "parameter")]]
    headers = {
        layout_of(entries, name, buffers).header
        for entries in manifests
        for name in CODECS
        for buffers in ("mean", "local", "first")
    }
    assert len(headers) == 3 * len(CODECS) * 3
    assert {len(header) for header in headers} == {HEADER_BYTES}


def test_an_empty_model_has_an_update_of_a_header() -> None:
    layout = layout_of([])
    assert (layout.num_bytes, layout.num_values, layout.segments) == (HEADER_BYTES, 0, ())


def test_tensors_by_pattern_stay_at_their_site() -> None:
    manifest = Manifest.build(SMALL)
    layout = update_layout(manifest, codec("native"), "mean", ["head.*", "norm.*"])
    absent = {"head.weight", "norm.running_mean", "norm.num_batches_tracked"}
    assert {spec.name for spec in layout.absent} == absent
    travelling: list[MeanEntry | RawEntry] = [*layout.means, *layout.raws]
    assert {entry.spec.name for entry in travelling} == {spec.name for spec in manifest} - absent
    assert layout.header != update_layout(manifest, codec("native"), "mean").header


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["haed.*"], ["'haed.*'", "no tensor", "'head.weight'"]),
        (["head.*", "zzz"], ["'zzz'", "no tensor"]),
        (["*"], ["every parameter"]),
    ],
)
def test_a_pattern_that_helps_nobody_is_refused(patterns: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        update_layout(Manifest.build(SMALL), codec("native"), "mean", patterns)
    assert caught.value.key == "strategy.local"
    assert all(word in str(caught.value) for word in words)
