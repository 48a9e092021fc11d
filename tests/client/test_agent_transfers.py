"""The agent's transfers against a real server: broken, taken back, refused, damaged."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from samples.dialogue import MODEL, eventually, held, join, result_of, train
from samples.scripted_server import ScriptedServer
from samples.stub_worker import UPDATE_BYTES, update_of
from samples.trial_site import TrialSite, key_text, make_task

from atoll.transport.durable import sync_file
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Stale, Unavailable, Unknown, to_detail
from atoll.wire.model_file import open_model


async def test_an_upload_that_breaks_goes_on_where_it_stopped(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    result = await train(server, line, task)
    server.transfers.break_upload_after_bytes = 1
    server.grant_upload(line, result)
    result_of(again := await line.hear("result"), task)
    grant = server.grant_upload(line, again, received=update_of(key_text(task.key))[: UPDATE_BYTES // 2])
    assert await server.whole(grant) == update_of(key_text(task.key))


async def test_the_end_of_an_update_leaves_once_the_update_is_durable(
    server: ScriptedServer, running: TrialSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = threading.Event()

    def sync_slowly(path: Path) -> None:
        assert durable.wait(60)
        sync_file(path)

    monkeypatch.setattr("atoll.transport.outbox.sync_file", sync_slowly)
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    grant = server.grant_upload(line, await train(server, line, task))
    await asyncio.sleep(0.1)
    assert not server.transfers.received[grant]  # its one frame is also its last
    assert held(running) == []
    durable.set()
    assert await server.whole(grant) == update_of(key_text(task.key))
    assert len(held(running)) == 1


async def test_a_grant_that_is_taken_back_is_asked_for_again(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    line.say(task=task)
    await line.hear("fetch")
    line.say(grant_withdrawn=pb.GrantWithdrawn(grant="", reason=to_detail(Unavailable("no room", run=run))))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    result_of(await line.hear("result"), task)


async def test_an_upload_whose_grant_is_taken_back_makes_way_for_the_next(
    server: ScriptedServer, running: TrialSite
) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    result = await train(server, line, task)
    server.transfers.hold_upload = asyncio.Event()
    slow = server.grant_upload(line, result)
    await eventually(lambda: server.transfers.received[slow])
    line.say(grant_withdrawn=pb.GrantWithdrawn(grant=slow, reason=to_detail(Stale("too slow"))))
    result_of(await line.hear("result"), task)
    server.transfers.hold_upload = None
    grant = server.grant_upload(line, result)
    assert await server.whole(grant) == update_of(key_text(task.key))
    await line.silence()


async def test_a_grant_for_what_is_not_held_is_answered(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    lost = pb.Result(key=make_task(run).key, payloads=[pb.Payload(name="update", num_bytes=8)])
    server.grant_upload(line, lost)
    failed = await line.hear("task_failed")
    assert (failed.key, failed.error.kind) == (lost.key, "Unknown")


async def test_a_download_that_breaks_goes_on_where_it_stopped(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    line.say(task=task)
    server.transfers.break_download_after_bytes = 2 * server.transfers.frame_bytes
    server.grant_download(line, await line.hear("fetch"), MODEL)
    fetch = await line.hear("fetch")
    assert 0 < fetch.offset < len(MODEL)
    server.grant_download(line, fetch, MODEL)
    result_of(await line.hear("result"), task)
    with open_model(running.home.models / run / "0.safetensors") as model:
        assert bytes(model.map) == MODEL


async def test_a_grant_that_comes_when_its_version_is_not_wanted_any_more_is_given_back(
    server: ScriptedServer, running: TrialSite
) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    line.say(task=task)
    fetch = await line.hear("fetch")
    line.say(cancel_task=pb.CancelTask(key=task.key))
    server.grant_download(line, fetch, MODEL)
    await eventually(lambda: list(server.transfers.begun.values()) == [len(MODEL)])
    assert not list((running.home.models / run).glob("0.*"))


async def test_a_version_that_is_not_to_be_had_fails_the_task(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    line.say(task=make_task(run))
    await line.hear("fetch")
    gone = Unknown("version 0 is not kept any more", run=run)
    line.say(grant_withdrawn=pb.GrantWithdrawn(grant="", reason=to_detail(gone)))
    assert (await line.hear("task_failed")).error.kind == "Unknown"


async def test_bytes_that_are_no_version_of_the_model_are_refused(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL + b"more")
    assert (await line.hear("task_failed")).error.kind == "Malformed"
    line.say(task=make_task(run, attempt=2))
    server.grant_download(line, await line.hear("fetch"), MODEL, crc32=1)
    again = await line.hear("fetch")  # damaged on its way: nothing of it is kept
    assert again.offset == 0
