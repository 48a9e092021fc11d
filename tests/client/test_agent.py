"""The agent against a real server that follows a script: offers and tasks."""

from __future__ import annotations

import asyncio

import pytest
from samples.dialogue import MODEL, eventually, held, join, result_of, train
from samples.scripted_server import ScriptedServer
from samples.stub_worker import update_of
from samples.trial_site import MANIFEST, SITE, TrialSite, install, key_text, make_offer, make_task

from atoll.transport.tasks import TaskLog
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import DiskFull, Stale, to_detail
from atoll.wire.model_file import open_model


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
    await eventually(lambda: not held(running))

    line.say(task=make_task(run, kind=pb.EVALUATE))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    evaluated = await line.hear("result")
    await eventually(lambda: not base.exists())  # a newer one is here
    assert (evaluated.weight, evaluated.metrics["accuracy"].sum, list(evaluated.payloads)) == (0, 9.0, [])
    line.say(verdict=pb.Verdict(key=evaluated.key, released=True))
    await eventually(lambda: not held(running))

    # Version 1 is here already: the next training starts from it at once.
    await train(server, line, make_task(run, 2), fetches=False)
    line.say(run_ended=pb.RunEnded(run=run, status="finished"))
    await eventually(lambda: not held(running) and not (running.home.models / run).exists())
    await eventually(lambda: not running.home.run_state(run).exists())
    await join(line)  # its place is free


async def test_one_worker_stays_for_all_tasks_of_a_run(server: ScriptedServer, running: TrialSite) -> None:
    """App, model and data are loaded once, not once a round."""
    line = await server.attached()
    run = await join(line)
    await train(server, line, make_task(run))
    await train(server, line, make_task(run, 2, version=0), fetches=False)
    line.say(task=(judged := make_task(run, kind=pb.EVALUATE, version=0)))
    result_of(await line.hear("result"), judged)
    assert len(running.trainings()) == 2
    assert len(running.workers()) == 1


async def test_each_run_has_a_worker_of_its_own(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    for _ in range(2):
        run = await join(line)
        line.say(run_ended=pb.RunEnded(run=run, status="finished"))
        await eventually(lambda run=run: not running.home.run_state(run).exists())  # type: ignore[misc]
    assert len(set(running.workers())) == 2


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"app": "unheard"}, "Unknown", "knows no app"),
        ({"app": "old"}, "Unknown", "script"),
        ({"app": "absent"}, "Unknown", "not installed"),
        ({"app": "forbidden"}, "PolicyRefused", "allowed_apps"),
        ({"fewest_sites": 2}, "PolicyRefused", "min_cohort"),
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


async def test_a_worker_that_dies_while_it_gets_ready_is_started_again(
    server: ScriptedServer, running: TrialSite
) -> None:
    line = await server.attached()
    running.fault.write_text("prepare die-once")
    await join(line)
    assert not running.fault.exists()


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


async def test_a_full_disk_is_waited_out(
    server: ScriptedServer, running: TrialSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.client.work.DISK_PATIENCE_S", 0.05)
    line = await server.attached()
    run = await join(line)
    running.fault.write_text("train full")
    task = make_task(run)
    line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    async with asyncio.timeout(20):
        while "held up" not in running.home.status.read_text():
            await asyncio.sleep(0.02)
    assert "waits for disk space" in running.home.status.read_text()
    running.fault.unlink()
    assert (await line.hear("result")).key == task.key


async def test_a_task_that_cannot_be_written_down_waits_for_room(
    server: ScriptedServer, running: TrialSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.client.agent.DISK_PATIENCE_S", 0.05)
    line = await server.attached()
    run = await join(line)
    accept, full = TaskLog.accept, [True, True]

    def accept_with_room(self: TaskLog, task: pb.Task) -> bool:
        if full:
            full.pop()
            raise DiskFull("no room on the disk")
        return accept(self, task)

    monkeypatch.setattr(TaskLog, "accept", accept_with_room)
    await train(server, line, make_task(run))
    assert not full


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
    await eventually(lambda: [name.rsplit("_", 1)[-1] for name in held(running)] == ["2"])


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
