"""The agent against a real server that follows a script: offers, tasks, deliveries, and what comes in between."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from samples.scripted_server import Line, ScriptedServer
from samples.stub_worker import MAX_WEIGHT, UPDATE_BYTES, update_of
from samples.trial_site import MANIFEST, SITE, TrialSite, install, key_text, make_offer, make_task

from atoll.client.status import site_status
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Incompatible, Stale, Stranger, Unavailable, Unknown, to_detail
from atoll.wire.model_file import open_model

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
    assert result.key == task.key
    return result


async def eventually(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def held(site: TrialSite) -> list[str]:
    return [path.name for path in (site.home.outbox / "held").iterdir()]


async def test_a_run_from_offer_to_end(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    assert line.hello.capacity.runs_at_once == 1
    run = await join(line)

    task = make_task(run)
    result = await train(server, line, task)
    base = running.home.models / run / "0.safetensors"
    with open_model(base) as model:
        assert model.manifest == MANIFEST
        assert bytes(model.map) == MODEL
    assert (result.round, result.weight, result.metrics["loss"].count) == (1, 10, 10.0)
    grant = server.grant_upload(line, result)
    assert await server.whole(grant) == update_of(key_text(task.key))
    line.say(verdict=pb.Verdict(key=task.key, accepted=True))
    await line.silence()
    assert len(held(running)) == 1
    line.say(committed=pb.Committed(run=run, round=1, version=1))
    await eventually(lambda: not held(running) and not base.exists())

    line.say(task=make_task(run, kind=pb.EVALUATE))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    evaluated = await line.hear("result")
    assert (evaluated.weight, evaluated.metrics["accuracy"].sum, list(evaluated.payloads)) == (0, 9.0, [])
    line.say(verdict=pb.Verdict(key=evaluated.key, released=True))
    await eventually(lambda: not held(running))

    # Version 1 is here already: the next training starts from it at once.
    await train(server, line, make_task(run, 2), fetches=False)
    line.say(run_ended=pb.RunEnded(run=run, status="finished"))
    await eventually(lambda: not held(running) and not (running.home.models / run).exists())
    await eventually(lambda: not running.home.run_state(run).exists())
    await join(line)  # its place is free


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"app": "unheard"}, "Unknown", "knows no app"),
        ({"app": "old"}, "Unknown", "script"),
        ({"app": "absent"}, "Unknown", "not installed"),
        ({"app": "forbidden"}, "PolicyRefused", "allowed_apps"),
        ({"num_sites": 2}, "PolicyRefused", "min_cohort"),
        ({"rounds": 11}, "PolicyRefused", "max_rounds"),
        ({"data": "unheard"}, "Unknown", "has no data"),
    ],
)
async def test_what_is_not_agreed_to_is_declined_before_anything_is_opened(
    server: ScriptedServer, running: TrialSite, change: dict[str, object], kind: str, words: str
) -> None:
    line = await server.attached()
    offer = make_offer(**change)  # type: ignore[arg-type]
    line.say(run_offer=offer)
    reply = await line.hear("offer_reply")
    assert (reply.decline.kind, reply.decline.site, reply.decline.run) == (kind, SITE, offer.run) or (
        kind == "Unknown" and reply.decline.kind == kind
    )
    assert words in reply.decline.message + reply.decline.field
    assert not running.home.worker_log(offer.run).exists()  # no worker was started
    await join(line)


async def test_without_a_policy_everything_is_refused(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    running.home.policy.unlink()
    line.say(run_offer=(offer := make_offer()))
    reply = await line.hear("offer_reply")
    assert reply.decline.kind == "PolicyRefused"
    assert "no policy" in reply.decline.message
    assert not running.home.worker_log(offer.run).exists()


async def test_another_hash_is_refused_and_both_are_named(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    offer = make_offer()
    install(running.installed, text="class Trial: changed = True\n")
    line.say(run_offer=offer)
    decline = (await line.hear("offer_reply")).decline
    assert decline.kind == "NotAllowed"
    assert decline.bound == offer.app_hash
    assert decline.value == make_offer().app_hash
    assert decline.value in decline.message
    assert decline.bound in decline.message
    assert not running.home.worker_log(offer.run).exists()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("prepare raise", "AppFailed", "nothing to learn"),
        ("prepare no-device", "Unavailable", "cuda:7"),
        ("prepare die", "Unavailable", "WorkerDied"),
    ],
)
async def test_a_worker_that_does_not_get_ready_is_a_decline(
    server: ScriptedServer, running: TrialSite, fault: str, kind: str, words: str
) -> None:
    line = await server.attached()
    running.fault.write_text(fault)
    line.say(run_offer=make_offer())
    decline = (await line.hear("offer_reply")).decline
    assert decline.kind == kind
    assert words in decline.message
    assert str(running.root) not in decline.message  # paths are the site's own business
    running.fault.unlink()
    await join(line)


async def test_an_offer_that_is_none_is_declined(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    broken = make_offer()
    broken.job = b"{"
    line.say(run_offer=broken)
    assert (await line.hear("offer_reply")).decline.kind == "Malformed"
    strange = make_offer()
    strange.run = "../../etc"
    line.say(run_offer=strange)
    assert (await line.hear("offer_reply")).decline.kind == "Malformed"


async def test_a_site_that_is_busy_says_so(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    await join(line)
    line.say(run_offer=make_offer())
    decline = (await line.hear("offer_reply")).decline
    assert (decline.kind, decline.bound) == ("Unavailable", "1")


async def test_an_offer_that_comes_again_is_answered_again(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    offer = make_offer()
    await join(line, offer)
    await join(line, offer)


async def test_an_app_that_raises_fails_its_task_alone(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train raise")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    failed = await line.hear("task_failed")
    assert failed.error.kind == "AppFailed"
    running.fault.unlink()
    await train(server, line, make_task(run, attempt=2), fetches=False)


async def test_a_worker_that_dies_is_started_again(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train die-once")
    task = make_task(run)
    await train(server, line, task)
    assert running.trainings() == [key_text(task.key)] * 2


async def test_a_worker_that_always_dies_fails_its_task(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train die")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    failed = await line.hear("task_failed")
    assert failed.error.kind == "AppFailed"
    assert "died 3 times" in failed.error.message
    assert failed.error.round == 1
    assert len(running.trainings()) == 3


async def test_a_task_that_comes_twice_is_done_once(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    task = make_task(run)
    line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await asyncio.wait_for(line.progress.wait(), 20)
    line.say(task=task)
    await line.silence()
    running.fault.unlink()
    result_of(await line.hear("result"), task)
    line.say(task=task)  # crossed with the result
    await line.silence()
    line.say(verdict=pb.Verdict(key=task.key, refused=to_detail(Stale("the round is closed"))))
    await eventually(lambda: not held(running))
    line.say(task=task)
    assert (await line.hear("task_failed")).error.kind == "Stale"
    assert running.trainings() == [key_text(task.key)]


async def test_only_the_newest_attempt_counts(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await asyncio.wait_for(line.progress.wait(), 20)
    second = make_task(run, attempt=2)
    line.say(task=second)
    running.fault.unlink()
    result_of(await line.hear("result"), second)
    line.say(task=make_task(run))
    failed = await line.hear("task_failed")
    assert (failed.key.attempt, failed.error.kind) == (1, "Stale")
    assert [name.rsplit("_", 1)[-1] for name in held(running)] == ["2"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"round": 4}, "PolicyRefused"),  # beyond what was agreed to
        ({"kind": 77}, "Incompatible"),
        ({"config": b"[1]"}, "Malformed"),
        ({"config": b"{"}, "Malformed"),
    ],
)
async def test_a_task_that_makes_no_sense_fails(
    server: ScriptedServer, running: TrialSite, change: dict[str, object], kind: str
) -> None:
    line = await server.attached()
    run = await join(line)
    await train(server, line, make_task(run))
    task = make_task(run, 2, version=0)
    for name, value in change.items():
        setattr(task, name, value)
    line.say(task=task)
    assert (await line.hear("task_failed")).error.kind == kind


async def test_a_task_of_a_run_that_is_not_joined_is_unknown(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    task = make_task(make_offer().run)
    line.say(task=task)
    failed = await line.hear("task_failed")
    assert (failed.key, failed.error.kind) == (task.key, "Unknown")


async def test_a_task_that_is_cancelled_leaves_nothing(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train wait")
    task, waiting = make_task(run), make_task(run, 2, version=0)
    line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    await asyncio.wait_for(line.progress.wait(), 20)
    line.say(task=waiting)
    for given_up in (waiting, task):
        line.say(cancel_task=pb.CancelTask(key=given_up.key))
    await line.silence()
    running.fault.unlink()
    assert not held(running)
    await train(server, line, make_task(run, 3, version=0), fetches=False)
    assert key_text(waiting.key) not in running.trainings()


async def test_tasks_of_a_run_queue_in_order(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line)
    tasks = [make_task(run), make_task(run, 2, version=0), make_task(run, 1, kind=pb.EVALUATE, version=0)]
    for task in tasks:
        line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    for task in tasks:
        result_of(await line.hear("result"), task)


# --- transfers ------------------------------------------------------------------------------------------------------


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


# --- connections ----------------------------------------------------------------------------------------------------


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
