"""kill -9 of the agent at each named step, and of nothing else: what it said yes to is done once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import samples.trial_site
from samples.dialogue import held
from samples.scripted_server import Line, ScriptedServer
from samples.stub_worker import update_of
from samples.trial_site import MANIFEST, TrialSite, key_text, make_offer, make_task

import atoll
from atoll.client.status import site_status
from atoll.client.steps import Step
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import NotAllowed, to_detail
from atoll.wire.model_file import open_model

MODEL = bytes(MANIFEST.num_bytes)
PATIENCE_S = 30.0


@asynccontextmanager
async def agent_process(site: TrialSite, *step: Step) -> AsyncIterator[asyncio.subprocess.Process]:
    """The site's agent as a process, gone at the end of the block."""
    folders = (Path(atoll.__file__).parents[1], Path(samples.trial_site.__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        samples.trial_site.__file__,
        str(site.root),
        *step,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def killed(process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == -signal.SIGKILL


class Script:
    """A server's part in one round, as often as connections make it begin anew. It asks for no work twice."""

    def __init__(self, server: ScriptedServer) -> None:
        self.offer = make_offer()
        self.task = make_task(self.offer.run)
        self.update = b""
        self.committed = False
        self._server = server

    async def play(self, line: Line) -> None:
        """From wherever the site stands to an accepted and committed update."""
        if self.offer.run not in line.hello.joined_runs:
            line.say(run_offer=self.offer)
            assert (await line.hear("offer_reply")).accept.max_weight
        if self.committed and not line.hello.held_updates:
            return  # nothing is asked of a round that is over
        if not line.hello.held_updates:
            line.say(task=self.task)  # again: the attempt is the same, so it is no new work
        body = await self._next(line)
        while body != "result":
            self._server.grant_download(line, self.fetch, MODEL)
            body = await self._next(line)
        assert self.result.key == self.task.key
        self.update = await self._server.whole(self._server.grant_upload(line, self.result))
        line.say(verdict=pb.Verdict(key=self.task.key, accepted=True))
        line.say(committed=pb.Committed(run=self.offer.run, round=1, version=1))
        self.committed = True

    async def _next(self, line: Line) -> str:
        message = await line.hear_one_of("fetch", "result")
        if isinstance(message, pb.Fetch):
            self.fetch = message
            return "fetch"
        self.result = message
        return "result"


async def played_to(step: Step, server: ScriptedServer, site: TrialSite) -> Script:
    """A script whose site was killed at `step`."""
    script = Script(server)
    async with agent_process(site, step) as process:
        playing = asyncio.create_task(script.play(await server.attached()))
        await killed(process)
        playing.cancel()
    return script


async def finished(script: Script, server: ScriptedServer, site: TrialSite) -> None:
    """The site comes back, and the script is played to its end."""
    async with agent_process(site):
        line = await server.attached()
        await script.play(line)
        await released(site)
    assert script.update == update_of(key_text(script.task.key))


async def released(site: TrialSite) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(site.home.outbox.glob("*/*")):
            await asyncio.sleep(0.01)


async def gone(folder: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(folder.iterdir()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("step", [Step.ATTACHED, Step.OFFERED, Step.JOINED, Step.ACCEPTED, Step.FETCHED, Step.WORKED])
async def test_killed_before_the_result_is_durable(step: Step, server: ScriptedServer, site: TrialSite) -> None:
    script = await played_to(step, server, site) if step is not Step.ATTACHED else await _at_once(server, site)
    await finished(script, server, site)
    assert len(site.trainings()) == (2 if step is Step.WORKED else 1)


async def _at_once(server: ScriptedServer, site: TrialSite) -> Script:
    async with agent_process(site, Step.ATTACHED) as process:
        await server.attached()
        await killed(process)
    return Script(server)


@pytest.mark.parametrize("step", [Step.KEPT, Step.FINISHED, Step.UPLOADED, Step.JUDGED, Step.RELEASED])
async def test_killed_after_the_result_is_durable_nothing_is_trained_again(
    step: Step, server: ScriptedServer, site: TrialSite
) -> None:
    script = await played_to(step, server, site)
    if step is Step.RELEASED:
        assert script.update == update_of(key_text(script.task.key))
        assert held(site) == []
    else:
        await finished(script, server, site)
    assert len(site.trainings()) == 1


async def test_open_tasks_are_done_without_being_asked_again(server: ScriptedServer, site: TrialSite) -> None:
    script = await played_to(Step.FETCHED, server, site)
    async with agent_process(site):
        line = await server.attached()
        assert list(line.hello.open_tasks) == [script.task.key]
        assert list(line.hello.joined_runs) == [script.offer.run]
        fetch = await line.hear("fetch")  # what an earlier process fetched is compared, not sent again
        assert fetch.offset == len(MODEL)
        server.grant_download(line, fetch, MODEL)
        assert (await line.hear("result")).key == script.task.key


async def test_a_base_version_that_the_disk_lost_with_the_power_is_fetched_again(
    server: ScriptedServer, site: TrialSite
) -> None:
    script = await played_to(Step.FETCHED, server, site)
    (base,) = site.home.models.glob("*/*.safetensors")
    with base.open("r+b") as file:
        file.seek(base.stat().st_size - 4096)
        file.write(b"\xff" * 4096)
    async with agent_process(site):
        line = await server.attached()
        fetch = await line.hear("fetch")
        assert fetch.offset == len(MODEL)
        server.grant_download(line, fetch, MODEL)
        fetch = await line.hear("fetch")
        assert fetch.offset == 0
        server.grant_download(line, fetch, MODEL)
        assert (await line.hear("result")).key == script.task.key
        with open_model(base) as model:
            assert bytes(model.map) == MODEL


async def test_a_policy_that_was_tightened_meanwhile_counts(server: ScriptedServer, site: TrialSite) -> None:
    script = await played_to(Step.FETCHED, server, site)
    site.home.policy.unlink()
    async with agent_process(site):
        line = await server.attached()
        failed = await line.hear("task_failed")
        assert (failed.key, failed.error.kind) == (script.task.key, "PolicyRefused")
        left = await line.hear("leave_run")
        assert left.run == script.offer.run
        line.say(task=make_task(script.offer.run, 2))
        assert (await line.hear("task_failed")).error.kind == "Unknown"
    assert not site.trainings()


async def test_sigterm_ends_in_order_and_open_work_stays(server: ScriptedServer, site: TrialSite) -> None:
    async with agent_process(site) as process:
        line = await server.attached()
        script = Script(server)
        site.fault.write_text("train wait")
        playing = asyncio.create_task(script.play(line))
        await asyncio.wait_for(line.progress.wait(), PATIENCE_S)
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        playing.cancel()
    assert site_status(site.home.root)["connection"]["state"] == "stopped"
    site.fault.unlink()
    await finished(script, server, site)
    await no_worker_lives(site)


async def no_worker_lives(site: TrialSite) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while _workers_of(site):
            await asyncio.sleep(0.05)


def _workers_of(site: TrialSite) -> list[str]:
    """Command lines of worker processes of this site that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(site.worker) in text:
            found.append(text)
    return found


async def test_the_worker_ends_with_its_agent(server: ScriptedServer, site: TrialSite) -> None:
    await played_to(Step.FETCHED, server, site)
    await no_worker_lives(site)


async def test_killed_while_the_result_is_on_its_way_to_the_disk_and_to_the_server(
    server: ScriptedServer, site: TrialSite
) -> None:
    script = await played_to(Step.GRANTED, server, site)
    await finished(script, server, site)
    assert len(site.trainings()) in (1, 2)  # whichever of the two was first


async def test_what_the_server_never_heard_of_is_refused(server: ScriptedServer, site: TrialSite) -> None:
    script = await played_to(Step.KEPT, server, site)
    async with agent_process(site):
        line = await server.attached()
        assert list(line.hello.held_updates) == [script.task.key]
        await line.hear("result")
        refusal = NotAllowed("no such cohort", run=script.offer.run)
        line.say(verdict=pb.Verdict(key=script.task.key, refused=to_detail(refusal)))
        await released(site)
        line.say(run_ended=pb.RunEnded(run=script.offer.run, status="failed"))
        await gone(site.home.models)
