"""What tests of the agent say and hear again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from samples.scripted_server import Line, ScriptedServer
from samples.stub_worker import MAX_WEIGHT
from samples.trial_site import MANIFEST, TrialSite, make_offer

from atoll.wire import control_pb2 as pb

PATIENCE_S = 20.0
MODEL = bytes(range(256)) * (MANIFEST.num_bytes // 256) + bytes(MANIFEST.num_bytes % 256)


async def join(line: Line, offer: pb.RunOffer | None = None) -> str:
    """Offer a run and hear that the site takes part; its id."""
    offer = offer or make_offer()
    line.say(run_offer=offer)
    reply = await line.hear("offer_reply")
    assert reply.run == offer.run
    assert reply.accept.max_weight == MAX_WEIGHT, reply.decline
    return offer.run


async def train(server: ScriptedServer, line: Line, task: pb.Task, *, fetches: bool = True) -> pb.Result:
    """Give a training and hear its result."""
    line.say(task=task)
    if fetches:
        server.grant_download(line, await line.hear("fetch"), MODEL)
    return result_of(await line.hear("result"), task)


def result_of(result: pb.Result, task: pb.Task) -> pb.Result:
    """The result, which must be that of the task."""
    assert result.key == task.key
    return result


async def eventually(condition: Callable[[], object]) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def held(site: TrialSite) -> list[str]:
    """Folders of the results that are durable in the site's outbox."""
    return [path.parent.name for path in site.home.outbox.glob("*/result")]
