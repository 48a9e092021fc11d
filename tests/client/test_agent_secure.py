"""The agent in a run with secure aggregation: what it says of an update, and what it gives nobody."""

from __future__ import annotations

import pytest
from samples.dialogue import MODEL, eventually, held, join, train
from samples.scripted_server import ScriptedServer
from samples.stub_worker import update_of
from samples.trial_site import TrialSite, key_text, make_offer, make_task

from atoll.wire import control_pb2 as pb
from atoll.wire.job import parse_job
from atoll.wire.secure_pb2 import SecureEnd, SecurePlan


def secure_offer() -> pb.RunOffer:
    offer = make_offer()
    table = {
        "job": {"name": "trial", "app": "trial", "data": "trial", "rounds": 3, "wait_for_sites": "20s"},
        "strategy": {"schedule": {"kind": "rounds", "min": 5, "quorum": 5}},
        "evaluation": {"sites": False},
        "privacy": {"secure_aggregation": {}},
    }
    offer.job = parse_job(table).canonical()
    return offer


async def test_a_result_says_no_more_than_that_it_is_there(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line, secure_offer())
    task = make_task(run)
    result = await train(server, line, task)
    assert result == pb.Result(key=task.key, round=1)
    await eventually(lambda: held(running))
    [folder] = [path for path in running.home.outbox.iterdir() if path.is_dir()]
    update = update_of(key_text(task.key))
    assert (folder / "private.payload").read_bytes() == update
    assert not [path for path in folder.glob("*.sealed") if b"loss" in path.read_bytes()]

    for name in ("private", "update", "masked-1"):  # whatever the server grants itself
        line.say(grant=pb.Grant(grant="g" * 24, direction=pb.UP, key=task.key, payload=name, num_bytes=len(update)))
        failed = await line.hear("task_failed")
        assert f"does not hold payload '{name}'" in failed.error.message
    line.say(verdict=pb.Verdict(key=task.key, accepted=True))
    await line.silence()
    assert held(running)
    line.say(committed=pb.Committed(run=run, round=1, version=1))
    await eventually(lambda: not folder.exists())


@pytest.mark.parametrize("kind", [pb.EXCHANGE, pb.COLLECT])
async def test_a_task_that_would_show_the_update_is_refused(
    server: ScriptedServer, running: TrialSite, kind: pb.TaskKind
) -> None:
    line = await server.attached()
    run = await join(line, secure_offer())
    line.say(task=make_task(run, kind=kind, version=0))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    failed = await line.hear("task_failed")
    assert (failed.error.kind, failed.error.field) == ("PolicyRefused", "kind")
    assert "would show its update" in failed.error.message


async def test_without_a_signed_member_list_there_is_no_session(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    assert "secagg/1" not in line.hello.features  # in plain text
    run = await join(line, secure_offer())
    task = make_task(run)
    await train(server, line, task)
    line.say(secure_step=pb.SecureStep(key=task.key, session=1, plan=SecurePlan(opening=b"{}", hash=bytes(32))))
    answer = await line.hear("secure_answer")
    assert (answer.key, answer.session) == (task.key, 1)
    assert answer.refused.message.startswith("the opening of a session does not hold together")


async def test_a_step_of_a_task_that_nobody_has_is_refused_and_an_end_of_it_is_nothing(
    server: ScriptedServer, running: TrialSite
) -> None:
    line = await server.attached()
    run = await join(line, secure_offer())
    key = make_task(run).key
    line.say(secure_step=pb.SecureStep(key=key, session=1, plan=SecurePlan(opening=b"", hash=bytes(32))))
    answer = await line.hear("secure_answer")
    assert "holds no update of task" in answer.refused.message
    line.say(secure_step=pb.SecureStep(key=key, session=1, end=SecureEnd(version=1)))
    await line.silence()
    line.say(secure_step=pb.SecureStep(key=pb.TaskKey(run="no run"), session=1))
    await line.silence()


async def test_what_an_app_prints_and_values_of_an_update_stay_here(server: ScriptedServer, running: TrialSite) -> None:
    line = await server.attached()
    run = await join(line, secure_offer())
    running.fault.write_text("train raise")
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    failed = await line.hear("task_failed")
    assert failed.error.message == "site north: its app failed; its administrator finds the reason in the log there"


async def test_a_site_that_wants_it_declines_a_run_that_would_show_its_update(
    server: ScriptedServer, running: TrialSite
) -> None:
    policy = running.home.policy
    policy.write_text(f"{policy.read_text()}\nrequire_secagg = {{ fewest_survivors = 6 }}\n")
    line = await server.attached()
    line.say(run_offer=make_offer())
    declined = (await line.hear("offer_reply")).decline
    assert (declined.kind, declined.field, declined.value) == ("PolicyRefused", "require_secagg", "none")
    line.say(run_offer=secure_offer())
    declined = (await line.hear("offer_reply")).decline
    assert (declined.field, declined.value, declined.bound) == ("require_secagg.fewest_survivors", "5", "6")
    policy.write_text(policy.read_text().replace("6", "5"))
    await join(line, secure_offer())
