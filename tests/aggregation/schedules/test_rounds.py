"""What each event leads to, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from samples.rounds import (
    ADVICE,
    QUORUM_ADVICE,
    READY,
    S,
    accepted,
    after,
    close,
    committed,
    deadline,
    dispatch,
    failed,
    fired,
    joined,
    left,
    play,
    rounds,
)

from atoll.aggregation.schedule import (
    Action,
    Cancel,
    Dispatch,
    Event,
    GiveUp,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.rounds import Phase

ABC = [*joined("c", "a", "b"), READY]
IN_ABC = accepted("a", "b", "c")

TABLE: dict[str, tuple[dict[str, Any], list[Event], tuple[Action, ...]]] = {
    "nothing happens before ready": ({}, joined("a", "b", "c"), ()),
    "ready starts the first round": ({}, ABC, (dispatch("a", "b", "c"), deadline())),
    "the deadline is the job's": (
        {"deadline": "90s"},
        ABC,
        (dispatch("a", "b", "c"), SetTimer(name="deadline/1", after_s=90.0)),
    ),
    "the largest weight of the cohort is told": (
        {},
        [*joined("a", max_weight=7), *joined("b", max_weight=90), READY],
        (dispatch("a", "b", max_weight=90), deadline()),
    ),
    "too few at ready": (
        {"min": 4},
        ABC,
        (GiveUp(reason=f"round 1 needs 4 sites, there are 3: a, b, c{ADVICE}"),),
    ),
    "nobody at ready": ({}, [READY], (GiveUp(reason=f"round 1 needs 2 sites, there are 0: nobody{ADVICE}"),)),
    "ready twice": ({}, [*ABC, READY], ()),
    "some are in": ({}, [*ABC, *accepted("b", "a")], ()),
    "all in": ({}, [*ABC, *IN_ABC], (deadline(after_s=0), close("a", "b", "c"))),
    "in any order": ({}, [*ABC, *reversed(IN_ABC)], (deadline(after_s=0), close("a", "b", "c"))),
    "twice in counts once": ({}, [*ABC, *accepted("a", "a", "b")], ()),
    "an update of another round": ({}, [*ABC, *accepted("a", "b"), *accepted("c", round=2)], ()),
    "an update of a stranger": ({}, [*ABC, *accepted("a", "b", "z")], ()),
    "quorum without deadline waits": ({"quorum": 2}, [*ABC, *accepted("a", "b")], ()),
    "quorum at the deadline": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), fired()],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("c",), reason="round 1 closed with 2 updates"),
            close("a", "b"),
        ),
    ),
    "quorum when the last one fails": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), failed("c")],
        (deadline(after_s=0), close("a", "b")),
    ),
    "quorum when the last one leaves": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), left("c")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("c",), reason="round 1 closed with 2 updates"),
            close("a", "b"),
        ),
    ),
    "quorum when one leaves before the others are in": (
        {"quorum": 2},
        [*ABC, left("b"), *accepted("a", "c")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("b",), reason="round 1 closed with 2 updates"),
            close("a", "c"),
        ),
    ),
    "below the quorum at the deadline": (
        {"quorum": 2},
        [*ABC, *accepted("b"), left("c"), fired()],
        (
            GiveUp(
                reason="round 1 has 1 of the 2 updates that it needs; missing: a: no update yet; "
                f"c: gone (lease ran out){QUORUM_ADVICE}"
            ),
        ),
    ),
    "the whole cohort is the quorum where none is given": (
        {},
        [*ABC, *accepted("a", "b"), fired()],
        (GiveUp(reason=f"round 1 has 2 of the 3 updates that it needs; missing: c: no update yet{QUORUM_ADVICE}"),),
    ),
    "a failure that makes the quorum impossible": (
        {},
        [*ABC, *accepted("a", "b"), failed("c")],
        (
            GiveUp(
                reason=f"round 1 has 2 of the 3 updates that it needs; missing: c: failed (out of memory){QUORUM_ADVICE}"
            ),
        ),
    ),
    "a gone site may come back until the deadline": ({}, [*ABC, *accepted("a", "b"), left("c")], ()),
    "it came back with its update": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *joined("c"), *accepted("c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "its update came before itself": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *accepted("c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "it came back and failed": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *joined("c"), failed("c")],
        (
            GiveUp(
                reason=f"round 1 has 2 of the 3 updates that it needs; missing: c: failed (out of memory){QUORUM_ADVICE}"
            ),
        ),
    ),
    "it did not come back": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), fired()],
        (
            GiveUp(
                reason=f"round 1 has 2 of the 3 updates that it needs; missing: c: gone (lease ran out){QUORUM_ADVICE}"
            ),
        ),
    ),
    "whoever leaves after its update is in it": (
        {},
        [*ABC, *accepted("a"), left("a"), *accepted("b", "c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "a lost update is asked for again": (
        {},
        [*ABC, *accepted("a", "b"), failed("a")],
        (dispatch("a"), deadline()),
    ),
    "a lost update opens a closing round": (
        {},
        [*ABC, *IN_ABC, failed("b")],
        (dispatch("b"), deadline()),
    ),
    "and closes it again": (
        {},
        [*ABC, *IN_ABC, failed("b"), *accepted("b")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "lost twice is a failure": (
        {"quorum": 2},
        [*ABC, *IN_ABC, failed("b"), failed("b")],
        (deadline(after_s=0), close("a", "c")),
    ),
    "the update of one who left is lost": (
        {},
        [*ABC, *IN_ABC, left("b"), failed("b")],
        (deadline(),),
    ),
    "it is lost, but the quorum stands": (
        {"quorum": 2},
        [*ABC, *IN_ABC, left("b"), failed("b")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("b",), reason="round 1 closed with 2 updates"),
            close("a", "c"),
        ),
    ),
    "the deadline of another round": ({"quorum": 2}, [*ABC, *accepted("a", "b"), fired(2)], ()),
    "a late joiner waits for the next round": ({}, [*ABC, *joined("d")], ()),
    "a late joiner does not hold up the round": (
        {},
        [*ABC, *joined("d"), *IN_ABC],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "and is in the next one": (
        {},
        [*ABC, *joined("d"), *IN_ABC, committed(1)],
        (dispatch("a", "b", "c", "d", round=2), deadline(2)),
    ),
    "whoever left is not": (
        {},
        [*ABC, *IN_ABC, left("c"), committed(1)],
        (dispatch("a", "b", round=2), deadline(2)),
    ),
    "a site that came back with another weight": (
        {},
        [*ABC, *IN_ABC, left("c"), *joined("c", max_weight=99), committed(1)],
        (dispatch("a", "b", "c", round=2, max_weight=99), deadline(2)),
    ),
    "too few are left: wait for members": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1)],
        (SetTimer(name="members/2", after_s=S),),
    ),
    "a member comes": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1), *joined("d")],
        (dispatch("a", "d", round=2), deadline(2), SetTimer(name="members/2", after_s=0)),
    ),
    "nobody comes": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1), TimerFired(name="members/2")],
        (GiveUp(reason=f"round 2 needs 2 sites, there are 1: a{ADVICE}"),),
    ),
    "a commit that nobody asked for": ({}, [*ABC, committed(1)], ()),
    "a failure while closing of one who was not in": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), fired(), failed("c")],
        (),
    ),
    "an update while closing": ({"quorum": 2}, [*ABC, *accepted("a", "b"), fired(), *accepted("c")], ()),
    "nothing after the end": ({"min": 4}, [*ABC, *joined("d"), READY], ()),
    "one site alone": ({"min": 1}, [*joined("a"), READY, *accepted("a")], (deadline(after_s=0), close("a"))),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    options, events, wanted = TABLE[name]
    assert after(rounds(**options), events) == wanted


def whole_run(num_rounds: int) -> list[Event]:
    events = list(ABC)
    for round in range(1, num_rounds + 1):
        events += [*accepted("a", "b", "c", round=round), committed(round)]
    return events


def test_a_run_stops_after_its_last_round() -> None:
    state, actions = play(rounds(), whole_run(3), num_rounds=3)
    assert actions[-1] == (Stop(),)
    assert (state.phase, state.round, state.version) == (Phase.OVER, 3, 3)
    assert sum(isinstance(action, Dispatch) for some in actions for action in some) == 3
