"""Durations in settings: a number of seconds, or a text with a unit."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*$")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(value: object) -> float:
    """Seconds from a number or a text such as "90s", "10m", "1.5h".

    Raises:
        ValueError: it is neither, or not positive.
    """
    if isinstance(value, str) and (match := _DURATION.match(value)):
        seconds = float(match[1]) * _UNIT_S[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError('wanted a duration such as "90s", "10m" or "1.5h"')
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError("a duration is longer than nothing and shorter than ten years")
    return seconds


Seconds = Annotated[float, BeforeValidator(parse_duration_s)]
