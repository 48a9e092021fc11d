"""The agent's connection: broken, refused, drained; and what it shows of itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from samples.dialogue import MODEL, eventually, held, join, result_of
from samples.scripted_server import ScriptedServer
from samples.stub_worker import update_of
from samples.trial_site import TrialSite, key_text, make_offer, make_task

from atoll.client.status import site_status
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Incompatible, Stranger, Unavailable


async def test_work_goes_on_while_the_line_is_down(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    task = make_task(run)
    line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await asyncio.wait_for(line.progress.wait(), 20)
    await server.stop()
    running.fault.unlink()
    await eventually(lambda: held(running))
    await server.start()
    line = await server.attached()
    assert list(line.hello.held_updates) == [task.key]
    assert not line.hello.open_tasks
    assert list(line.hello.joined_runs) == [run]
    result = result_of(await line.hear("result"), task)
    grant = server.grant_upload(line, result)
    assert await server.whole(grant) == update_of(key_text(task.key))
    assert len(running.trainings()) == 1


async def test_what_is_open_is_named_and_a_fetch_is_made_again(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    task = make_task(run)
    line.say(task=task)
    await line.hear("fetch")
    line.end(Unavailable("going down"))
    line = await server.attached()
    assert list(line.hello.open_tasks) == [task.key]
    server.grant_download(line, await line.hear("fetch"), MODEL)
    result_of(await line.hear("result"), task)


async def test_a_failure_waits_for_the_next_stream(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await asyncio.wait_for(line.progress.wait(), 20)
    await server.stop()
    running.fault.write_text("train raise")
    await eventually(lambda: _run_state(running.home.root) == "failed")
    await server.start()
    line = await server.attached()
    assert (await line.hear("task_failed")).error.kind == "AppFailed"


async def test_a_server_that_drains_is_given_its_time(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    line.say(drain=pb.Drain(reconnect_after_s=1))
    line.end()
    began_s = asyncio.get_running_loop().time()
    await server.attached()
    assert asyncio.get_running_loop().time() - began_s >= 1


async def test_the_agent_ends_when_it_is_refused_at_the_first_try(server: ScriptedServer, site: TrialSite) -> None:
    server.refuse_with = Stranger("site north was revoked by the operator of federation trial")
    with pytest.raises(Stranger, match="revoked"):
        await site.agent().run()
    server.refuse_with, server.protocol = None, 9
    with pytest.raises(Incompatible, match="protocol 9"):
        await site.agent().run()


async def test_an_agent_that_was_attached_goes_on_trying(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    server.refuse_with = Stranger("not now")
    line.end(Unavailable("going down"))
    await eventually(lambda: "not now" in site_status(running.home.root)["connection"]["trouble"])
    server.refuse_with = None
    await server.attached()


async def test_the_status_tells_what_the_agent_does(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await eventually(lambda: _run_state(running.home.root) == "training")
    status = site_status(running.home.root)
    assert status["connection"]["state"] == "attached"
    assert status["runs"][0]["round"] == 1
    assert status["runs"][0]["num_rounds"] == 3
    apps = {app["name"]: app for app in status["apps"]}
    assert apps["trial"]["hash"] == make_offer().app_hash
    assert "not installed" in apps["absent"]["error"]
    assert status["policy"]["min_cohort"] == 3
    json.dumps(status)


def _run_state(home: Path) -> str:
    runs = site_status(home)["runs"]
    return str(runs[0]["state"]) if runs else ""
