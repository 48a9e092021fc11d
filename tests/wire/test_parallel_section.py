"""[parallel]: the combinations that are taken, and what is said of all others, before a process starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job
from atoll.wire.parallel_section import ParallelSection

TAKEN: list[tuple[dict[str, Any], int, tuple[int, ...], int]] = [
    # section, processes, degrees (pp, dp_replicate, dp_shard, cp, tp), level of ZeRO
    ({}, 1, (1, 1, 1, 1, 1), 0),
    ({"dp_replicate": -1}, 3, (1, 3, 1, 1, 1), 0),
    ({"dp_replicate": 4, "zero": 1}, 4, (1, 4, 1, 1, 1), 1),
    ({"dp_shard": -1}, 8, (1, 1, 8, 1, 1), 3),
    ({"dp_shard": -1, "zero": 2}, 8, (1, 1, 8, 1, 1), 2),
    ({"dp_shard": -1}, 1, (1, 1, 1, 1, 1), 0),
    ({"dp_replicate": 2, "dp_shard": -1}, 8, (1, 2, 4, 1, 1), 3),
    ({"tp": 2}, 2, (1, 1, 1, 1, 2), 0),
    ({"dp_shard": -1, "tp": 2}, 8, (1, 1, 4, 1, 2), 3),
    ({"pp": 4, "pipeline": {"microbatches": 4}}, 4, (4, 1, 1, 1, 1), 0),
    ({"pp": 2, "pipeline": {"schedule": "interleaved"}}, 2, (2, 1, 1, 1, 1), 0),
    ({"pp": 2, "dp_shard": -1}, 4, (2, 1, 2, 1, 1), 3),
]

REFUSED = [
    ({"tp": 2, "pp": 2}, "pp \\+ tp is no layout .* wanted one of"),
    ({"tp": 2, "dp_replicate": 2}, "dp_replicate \\+ tp is no layout"),
    ({"pp": 2, "dp_replicate": 2}, "dp_replicate \\+ pp is no layout"),
    ({"pp": 2, "dp_shard": 2, "tp": 2}, "dp_shard \\+ pp \\+ tp is no layout"),
    ({"cp": 2}, "_scaled_dot_product_flash_attention_for_cpu.*set cp = 1"),
    ({"dp_shard": -1, "tp": -1}, "dp_shard and tp are -1; one axis at most"),
    ({"dp_shard": 0}, "1 or more processes, or -1"),
    ({"dp_shard": 2, "zero": 1}, "zero = 1 divides no parameters"),
    ({"zero": 1}, "zero = 1 divides the optimizer among dp_replicate"),
    ({"dp_replicate": 2, "zero": 3}, "zero = 3 divides parameters among dp_shard"),
    ({"tp_plan": "app"}, "tp_plan has no effect without tp"),
    ({"pipeline": {"schedule": "gpipe"}}, "pipeline has no effect without pp"),
    ({"pp": 2, "pipeline": {"stages_per_rank": 2}}, "stages_per_rank = 2 is for interleaved"),
    ({"pp": 2, "pipeline": {"schedule": "interleaved", "stages_per_rank": 1}}, "needs stages_per_rank of 2"),
    ({"tp": 2, "precision": {"reduce": "bf16"}}, "precision.reduce has no effect"),
    ({"precision": {"param": "fp16"}}, "'model' or 'bf16'"),
    ({"clip_norm": 0}, "greater than 0"),
    ({"shards": 2}, "Extra inputs"),
]


@pytest.mark.parametrize(("table", "count", "shape", "zero"), TAKEN)
def test_takes_every_layout_that_is_compared_with_one_process(
    table: dict[str, Any], count: int, shape: tuple[int, ...], zero: int
) -> None:
    section = ParallelSection.model_validate(table)
    degrees = section.degrees(count)
    assert (degrees.shape, degrees.world_size, section.zero_of(degrees)) == (shape, count, zero)


@pytest.mark.parametrize(("table", "text"), REFUSED)
def test_refuses_all_others_and_says_why(table: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ParallelSection.model_validate(table)


@pytest.mark.parametrize(
    ("table", "count", "text"),
    [
        ({"dp_shard": 2, "processes": 3}, None, "dp_shard 2 does not make 3 processes"),
        ({"dp_shard": -1, "tp": 2, "processes": 5}, None, "dp_shard -1 x tp 2 does not make 5 processes"),
        ({"pp": 4, "pipeline": {"microbatches": 2}}, None, "microbatches = 2: 1f1b over 4 ranks wants at least 4"),
        (
            {"pp": 2, "pipeline": {"schedule": "interleaved", "microbatches": 5}},
            None,
            "at least 4 and a multiple of 2",
        ),
    ],
)
def test_numbers_that_do_not_fit_name_the_key(table: dict[str, Any], count: int | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        ParallelSection.model_validate(table).degrees(count)
    assert refused.value.key.startswith("parallel.")


def test_a_job_has_the_table_and_its_errors_name_it() -> None:
    job = {"job": {"name": "a", "app": "a", "rounds": 1}}
    assert parse_job(job).parallel is None
    assert b"parallel" not in parse_job(job).canonical()
    with_table = parse_job({**job, "parallel": {"dp_shard": -1, "tp": 2, "pipeline": {}}})
    assert with_table.parallel is not None
    assert parse_job(with_table.model_dump(mode="json", exclude_none=True)).parallel == with_table.parallel
    with pytest.raises(ConfigError, match="parallel"):
        parse_job({**job, "parallel": {"dp_shards": 2}})


def test_an_evaluation_has_one_stage_a_rank() -> None:
    pipeline = {"schedule": "interleaved", "split_points": ["a", "b", "c", "d", "e"], "microbatches": 6}
    plain = ParallelSection.model_validate({"pp": 3, "pipeline": pipeline}).for_forward_passes(3)
    assert (plain.stages_per_rank, plain.pipeline.split_points, plain.microbatches(3)) == (1, ("b", "d"), 6)
    automatic = ParallelSection.model_validate({"pp": 2}).for_forward_passes(2)
    assert automatic.pipeline.split_points == "auto"
