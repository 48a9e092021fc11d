"""What `atoll strategies` prints: for a terminal, for a pipe, of a plugin that is broken."""

from __future__ import annotations

import pytest

from atoll.aggregation.catalogue import Kind, describe
from atoll.cli.strategies import lines

KINDS = describe()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.part}-{kind.kind}")
def test_a_kind_is_a_line_in_a_pipe_and_wrapped_in_a_terminal(kind: Kind) -> None:
    piped = list(lines(kind, 0))
    assert len(piped) == 1 + len(kind.options)
    assert piped[0].startswith(f"  {kind.kind}: ")
    assert kind.summary in piped[0]
    shown = list(lines(kind, 80))
    assert max(map(len, shown)) <= 80
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(piped).split())


def test_what_comes_from_a_paper_names_it() -> None:
    papers = {(kind.part, kind.kind): kind.paper for kind in KINDS}
    assert papers[("strategy", "fedasync")] == "Xie et al. 2019, arXiv:1903.03934"
    assert papers[("reducer", "geometric_median")] == "Pillutla et al. 2019, arXiv:1912.13445"
    assert papers[("optimizer", "adamw")] == "Loshchilov and Hutter 2017, arXiv:1711.05101"
    without = {kind.kind for kind in KINDS if not kind.paper and kind.part in ("strategy", "reducer", "schedule")}
    assert without == set()
    median = next(kind for kind in KINDS if kind.kind == "median")
    assert next(lines(median, 0)).endswith("Yin et al. 2018, arXiv:1803.01498.")


def test_options_say_whether_they_have_to_be_given() -> None:
    options = {(kind.kind, option.name): option for kind in KINDS for option in kind.options}
    assert options[("bucketing", "inner")].type == "table"
    assert options[("sgd", "lr_schedule")].type == "table"
    krum = next(kind for kind in KINDS if kind.kind == "multi_krum")
    assert [line.strip().partition(":")[0] for line in lines(krum, 0)][1:] == ["faulty (required)", "select (optional)"]


def test_a_broken_plugin_is_one_line_that_obeys_nobody() -> None:
    failure = "ImportError: first line\nsecond \x1b[2J line"
    [line] = lines(Kind(part="rule", kind="mine", summary="", source="mine 1.0", failure=failure), 0)
    assert line == "  mine [mine 1.0]: cannot be used: ImportError: first line second \N{REPLACEMENT CHARACTER}[2J line"
