from __future__ import annotations

import pytest
import torch
from contracts.updates import BOUND, EVERY_DTYPE, SMALL, encoded, layout_of, random_state, rounding

from atoll.aggregation import encode
from atoll.aggregation.encode import encode_update
from atoll.aggregation.round_sum import RoundSum
from atoll.wire.errors import BadUpdate


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e9, -1024.5])
def test_a_wild_step_is_an_error_at_the_site(value: float) -> None:
    layout = layout_of(SMALL)
    base = random_state(layout.manifest, 0)
    trained = {name: tensor.clone() for name, tensor in base.items()}
    trained["head.weight"][200, 7] = value
    with pytest.raises(
        BadUpdate, match=r'tensor "head\.weight" moved by .* at element 52607, .* learning rate'
    ) as caught:
        encoded(layout, base, trained)
    assert (caught.value.field, float(caught.value.bound)) == ("head.weight", BOUND)


def test_the_bound_itself_is_allowed_and_passes_the_server() -> None:
    for codec in ("native", "float32", "bfloat16", "int8"):
        for bound in (1024.0, 1000.1, 0.3, 1e-6, 1e30):
            layout = layout_of([("w", "float32", (300,), "parameter")], codec)
            step = torch.nextafter(torch.tensor(bound), torch.tensor(0.0)).item()
            payload = encoded(layout, {"w": torch.zeros(300)}, {"w": torch.full((300,), step)}, bound=bound)
            RoundSum(layout, num_sites=3, max_weight=1, bound=bound).check(payload, 1)


def test_raw_floats_must_be_finite() -> None:
    layout = layout_of(SMALL, buffers="first")
    trained = random_state(layout.manifest, 1)
    trained["norm.running_mean"][3] = float("nan")
    with pytest.raises(BadUpdate, match=r'"norm\.running_mean" holds .* finite; lower the learning rate'):
        encoded(layout, trained, trained)


def test_tensors_must_be_those_of_the_manifest() -> None:
    layout = layout_of(SMALL)
    state = random_state(layout.manifest, 0)
    for wrong in (
        {name: tensor for name, tensor in state.items() if name != "half"},
        {**state, "half": state["half"].float()},
        {**state, "half": state["half"][:-1]},
    ):
        with pytest.raises(
            BadUpdate, match=r'tensor "half" is .*, manifest says float16 .*; .* build it in model\(\)'
        ) as caught:
            encoded(layout, state, wrong)
        assert (caught.value.field, caught.value.bound) == ("half", f"float16 {list(state['half'].shape)}")
        with pytest.raises(ValueError, match='tensor "half"'):
            encoded(layout, wrong, state)


def test_the_buffer_must_have_the_length_of_the_layout() -> None:
    layout = layout_of(SMALL)
    state = random_state(layout.manifest, 0)
    with pytest.raises(ValueError, match=f"takes {layout.num_bytes} bytes"):
        encode_update(layout, state, state, bytearray(layout.num_bytes - 1), rounding=rounding(), bound=BOUND)


def test_every_byte_is_written() -> None:
    layout = layout_of(EVERY_DTYPE, "int8")
    base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
    dirty = bytearray(b"\xff" * layout.num_bytes)
    encode_update(layout, base, trained, dirty, rounding=rounding(), bound=BOUND)
    assert bytes(dirty) == encoded(layout, base, trained)


def test_views_that_are_not_contiguous_are_read_in_order() -> None:
    layout = layout_of([("w", "float32", (40, 30), "parameter"), ("c", "complex64", (7,), "parameter")])
    base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
    transposed = {"w": trained["w"].t().contiguous().t(), "c": trained["c"].conj().resolve_conj().conj()}
    assert not transposed["w"].is_contiguous()
    assert encoded(layout, base, transposed) == encoded(layout, base, trained)


def test_block_size_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    for codec in ("native", "int8"):
        layout = layout_of(SMALL, codec)
        base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
        wanted = encoded(layout, base, trained)
        for size in (256, 4096, 1 << 20):
            monkeypatch.setattr(encode, "BLOCK_VALUES", size)
            assert encoded(layout, base, trained) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["native", "bfloat16", "int8"])
def test_a_model_on_the_device_gives_the_same_bytes(codec: str) -> None:
    layout = layout_of(SMALL, codec)
    base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
    on_device = {name: tensor.to("cuda") for name, tensor in trained.items()}
    assert encoded(layout, base, on_device) == encoded(layout, base, trained)
