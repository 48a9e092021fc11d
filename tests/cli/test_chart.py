"""The demo's picture of accuracy over rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.demonstration.chart import HEIGHT, WIDTH, draw, write_png


def test_a_higher_value_is_a_higher_column() -> None:
    lines = draw([0.2, 0.6, 1.0], 0.95)
    heights = [
        sum(line[7 + 2 * column : 8 + 2 * column].strip() not in ("", "┄") for line in lines[:HEIGHT])
        for column in range(3)
    ]
    assert heights == sorted(heights)
    assert heights[0] < heights[2]


def test_the_central_value_is_marked_once() -> None:
    for reference in (0.5, 0.95, 0.999, 1.0):
        assert sum("central" in line for line in draw([0.5, 0.9], reference)) == 1, reference


@pytest.mark.parametrize("values", [[0.0], [1.0], [0.5] * 3, [index / 200 for index in range(200)]])
def test_any_values_fit(values: list[float]) -> None:
    lines = draw(values, 0.97)
    assert len(lines) == HEIGHT + 1
    assert max(map(len, lines)) <= WIDTH + 30


def test_the_png_is_one(tmp_path: Path) -> None:
    assert write_png(tmp_path / "a.png", {1: 0.5, 2: 0.9, 4: 0.95}, 0.96, title="digits")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
