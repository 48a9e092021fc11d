"""The mailbox: order, one writer, and what outlives a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atoll.client.attachment import Mailbox
from atoll.wire import control_pb2 as pb


async def taken(messages: AsyncIterator[pb.SiteMessage]) -> list[str]:
    return [str(message.WhichOneof("body")) async for message in messages]


def post_all(mailbox: Mailbox) -> None:
    mailbox.post(heartbeat=pb.Heartbeat())
    mailbox.post(result=pb.Result())
    mailbox.post(task_failed=pb.TaskFailed())
    mailbox.post(fetch=pb.Fetch())
    mailbox.post(offer_reply=pb.OfferReply())


async def test_an_open_mailbox_gives_all_in_order() -> None:
    mailbox = Mailbox()
    mailbox.open()
    post_all(mailbox)
    mailbox.finish()
    assert await taken(mailbox.messages()) == ["heartbeat", "result", "task_failed", "fetch", "offer_reply"]


async def test_without_a_stream_only_what_is_not_told_anew_is_kept() -> None:
    mailbox = Mailbox()
    post_all(mailbox)
    mailbox.open()
    mailbox.finish()
    assert await taken(mailbox.messages()) == ["task_failed", "offer_reply"]


async def test_a_broken_stream_keeps_the_message_that_it_could_not_write() -> None:
    mailbox = Mailbox()
    mailbox.open()
    post_all(mailbox)
    messages = mailbox.messages()
    for wanted in ("heartbeat", "result", "task_failed"):
        assert (await anext(messages)).WhichOneof("body") == wanted
    mailbox.shut()  # gRPC never asked for the one after task_failed
    mailbox.open()
    mailbox.finish()
    assert await taken(mailbox.messages()) == ["task_failed", "offer_reply"]


async def test_an_old_stream_takes_nothing_from_a_new_one() -> None:
    mailbox = Mailbox()
    mailbox.open()
    old = asyncio.create_task(taken(mailbox.messages()))
    await asyncio.sleep(0)
    mailbox.shut()
    mailbox.open()
    mailbox.post(fetch=pb.Fetch())
    mailbox.finish()
    assert await taken(mailbox.messages()) == ["fetch"]
    assert await old == []
