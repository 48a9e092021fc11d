"""Names: what is taken, what is refused, and run ids that sort by time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire import names
from atoll.wire.errors import Malformed

CHECKS: dict[Callable[[str], str], tuple[list[str], list[str]]] = {
    names.check_site_name: (["a", "site-1", "0", "a" * 63], ["", "A", "-a", "a-", "a" * 64, "a.b", "ä", "a\n"]),
    names.check_task_id: (
        ["r1000000." + "a" * 63, "a" * 96, "_"],
        ["", "..", ".a", "-a", "a/b", "a" * 97, "a\x00", "a\n"],
    ),
    names.check_payload_name: (["update"], ["", "../x", "up date"]),
    names.check_request_id: (["01JD"], ["", "a" * 65]),
    names.check_organisation: (["St. Mary's Höspital"], ["", " a", "a ", "a\x1b[2J", "a" * 129]),
    names.check_run_id: (["01M8N2614HRBCR5QJTH98Q57FY"], ["", "01M8N2614HRBCR5QJTH98Q57F", "8" + "0" * 25, "I" * 26]),
    lambda text: names.check_label(text, "app"): (["digits", "Fashion_2.0"], ["", ".hidden", "a b", "a" * 64]),
    lambda text: names.check_sha256(text, "app_hash"): (["0f" * 32], ["", "0F" * 32, "0" * 63]),
}


@pytest.mark.parametrize(("check", "good"), [(check, name) for check, (good, _) in CHECKS.items() for name in good])
def test_taken(check: Callable[[str], str], good: str) -> None:
    assert check(good) == good


@pytest.mark.parametrize(("check", "bad"), [(check, name) for check, (_, bad) in CHECKS.items() for name in bad])
def test_refused(check: Callable[[str], str], bad: str) -> None:
    with pytest.raises(Malformed) as caught:
        check(bad)
    assert caught.value.field
    assert caught.value.bound
    assert caught.value.message.isprintable()


@given(st.floats(0, 1e11), st.floats(0.001, 1e6))
def test_run_ids_are_valid_and_sort_by_time(now_s: float, later_s: float) -> None:
    earlier = names.check_run_id(names.new_run_id(now_s))
    assert earlier < names.new_run_id(now_s + later_s + 0.001)


def test_run_ids_of_one_moment_differ() -> None:
    assert names.new_run_id(1.0) != names.new_run_id(1.0)
    assert names.new_run_id(0.0, lambda bits: (1 << bits) - 1) == "0000000000" + "Z" * 16
