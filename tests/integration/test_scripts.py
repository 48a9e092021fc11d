"""Scripts with loops of their own in a real federation: they join by one line, die, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from integration.federation import PATIENCE_S, Federation, Process, command
from integration.trial import breast_cancer

SITES = ("site-1", "site-2")
ONE_LINE = """
import sys
import time
from pathlib import Path
import numpy as np
import torch
from torch import nn
import atoll

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
with np.load(sys.argv[1]) as file:
    x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
if len(sys.argv) > 3:
    atoll.save_model(model, sys.argv[3])
    sys.exit()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
joined = atoll.join(model, optimizer, examples=32)
for step in range(100_000):
    chosen = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    with open(sys.argv[2], "a") as log:
        print(joined.round, step, file=log)
    while Path(sys.argv[2] + ".hold").exists() and joined.round == 2:
        time.sleep(0.02)
    optimizer.step()
"""
BY_ROUNDS = """
import sys
import numpy as np
import torch
from torch import nn
import atoll

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
connection = atoll.connect()
with np.load(connection.data["path"]) as file:
    x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
for round in connection.rounds(max_examples=len(x)):
    round.load(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=connection.values["lr"])
    total = 0.0
    for chosen in torch.randperm(len(x)).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        total += float(loss) * len(chosen)
    round.report(examples=len(x), metrics={"loss": (total, len(x))})
print("after the last round", flush=True)
"""


def job(rounds: int, schedule: str, more: str = "") -> str:
    return f"""
[job]
name = "script"
script = "train"
rounds = {rounds}
start = "model.safetensors"
wait_for_sites = "90s"
{more}
[strategy]
kind = "fedavg"
schedule = {{ {schedule}, min = 2 }}
"""


STEPS = 'kind = "every_steps", steps = 10'


class Scripts:
    """A federation whose sites have a script."""

    def __init__(self, federation: Federation, text: str, sites: Sequence[str] = SITES) -> None:
        self.federation = federation
        self.path = federation.root / "train.py"
        self.path.write_text(text)
        federation.start_server()
        federation.enrol_researcher()
        (federation.researcher / "user.toml").write_text(f'[scripts.train]\npath = "{self.path}"\n')
        for name in sites:
            federation.enrol_site(
                name,
                settings=f'[scripts.train]\npath = "{self.path}"\n[data.trial]\npath = "{federation.root / name}.npz"\n',
                policy='allowed_apps = [{ name = "train", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 1\n',
            )
        federation.sign()
        for name in sites:
            federation.start_site(name)
        self.write_model()

    def write_model(self) -> None:
        maker = self.federation.root / "make_model.py"
        maker.write_text(ONE_LINE)
        subprocess.run(
            [sys.executable, maker, self.data("site-1"), "-", self.federation.root / "model.safetensors"],
            check=True,
            env=self.federation.environment,
        )

    def data(self, site: str) -> Path:
        return self.federation.root / f"{site}.npz"

    def steps(self, site: str) -> Path:
        """The file in which a site's script notes its steps."""
        return self.federation.root / f"{site}.steps"

    def execute(
        self, site: str, run: str, program: Sequence[str | Path] = (sys.executable,), *, notes: bool = True
    ) -> Process:
        """`atoll site exec` at a site, once its agent waits for a script."""
        waiting = self.federation.home(site) / "state" / "runs" / run / "worker" / "script.socket"
        self.federation.wait_for(waiting.exists, f"{site} waits for a script")
        arguments = [*program, self.path, self.data(site), *([self.steps(site)] if notes else [])]
        return self.federation.start_program(
            f"exec-{site}",
            command(["site", "exec", run, "--home", self.federation.home(site), "--", *arguments]),
        )

    def accuracy(self, run: str) -> float:
        model = self.federation.model(run)
        x, y = breast_cancer()
        hidden = np.tanh(x[450:] @ model["0.weight"].T + model["0.bias"])
        found = (hidden @ model["2.weight"].T + model["2.bias"]).argmax(1)
        return float((found == y[450:]).mean())


def ended(process: Process) -> tuple[int, str]:
    return process.popen.wait(PATIENCE_S), process.text()


def test_a_script_joins_by_one_line_and_is_killed_on_the_way(federation: Federation) -> None:
    """One of two scripts is killed (-9) in the middle of the second round; started again, it does the round once more."""
    scripts = Scripts(federation, ONE_LINE)
    hold = Path(f"{scripts.steps('site-1')}.hold")
    hold.touch()
    run = federation.submit(job(4, STEPS))
    doomed, other = (scripts.execute(site, run) for site in SITES)

    def in_second_round() -> bool:
        path = scripts.steps("site-1")
        return path.exists() and any(line.startswith("2 ") for line in path.read_text().splitlines())

    federation.wait_for(in_second_round, "the second round", doomed)
    (script,) = federation.children(doomed)
    os.kill(script, signal.SIGKILL)
    code, text = ended(doomed)
    assert code == 128 + signal.SIGKILL
    assert "started again, it gets the same round" in text
    hold.unlink()
    again = scripts.execute("site-1", run)
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    assert [(record["sites"], record["missing"]) for record in state["rounds"]] == [(2, {})] * 4
    for process in (again, other):
        assert ended(process)[0] == 0, process.text()
    assert scripts.accuracy(run) > 0.9
    rounds = [int(line.split()[0]) for line in scripts.steps("site-2").read_text().splitlines()]
    assert [rounds.count(number) for number in (1, 2, 3, 4)] == [10] * 4  # and none of them twice


EARLY = ONE_LINE.replace("range(100_000)", "range(100_000 if 'site-1' in sys.argv[1] else 15)")
SPREAD = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import numpy as np
import atoll

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
with np.load(sys.argv[1]) as file:
    x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
atoll.join(model, optimizer, examples=16)
while True:
    chosen = torch.randint(len(x), (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    optimizer.step()
"""


@pytest.mark.chaos
def test_an_agent_that_is_killed_finds_its_script_again(federation: Federation) -> None:
    """torchrun at one site. The other's agent is killed (-9) in the second round, while its script goes on."""
    scripts = Scripts(federation, ONE_LINE)
    hold = Path(f"{scripts.steps('site-2')}.hold")
    hold.touch()
    run = federation.submit(job(4, STEPS))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone")
    processes = [scripts.execute("site-1", run, torchrun), scripts.execute("site-2", run)]

    def in_second_round() -> bool:
        path = scripts.steps("site-2")
        return path.exists() and any(line.startswith("2 ") for line in path.read_text().splitlines())

    federation.wait_for(in_second_round, "the second round", processes[1])
    federation.kill_and_start("site-2")
    hold.unlink()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    assert [(record["sites"], record["missing"]) for record in state["rounds"]] == [(2, {})] * 4
    for process in processes:
        assert ended(process)[0] == 0, process.text()
    rounds = [int(line.split()[0]) for line in scripts.steps("site-2").read_text().splitlines()]
    assert [rounds.count(number) for number in (1, 2, 3, 4)] == [10] * 4  # none of them twice
    assert scripts.accuracy(run) > 0.9


@pytest.mark.chaos
def test_processes_of_a_script_average_inside_a_site_and_between_sites(federation: Federation) -> None:
    scripts = Scripts(federation, SPREAD)
    run = federation.submit(job(3, STEPS))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    processes = [scripts.execute(site, run, torchrun) for site in SITES]
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    for process in processes:
        assert ended(process)[0] == 0, process.text()
    assert scripts.accuracy(run) > 0.9


@pytest.mark.chaos
def test_a_script_that_ends_early_leaves_the_run_and_says_why(federation: Federation) -> None:
    scripts = Scripts(federation, EARLY)
    run = federation.submit(job(3, STEPS))
    processes = [scripts.execute(site, run) for site in SITES]
    code, text = ended(processes[1])
    assert code == 0
    assert "the script ended after" in text
    assert "steps of round 2, before the run did" in text
    state = federation.wait_for_end(run)
    assert state["status"] == "failed", state  # it wants two sites
    assert ended(processes[0])[0] == 0, processes[0].text()


@pytest.mark.chaos
def test_the_example_reaches_what_it_promises(federation: Federation) -> None:
    """examples/script, as its README says: one process at one site, two at the other."""
    folder = Path(__file__).parents[2] / "examples" / "script"
    scripts = Scripts(federation, (folder / "train.py").read_text())
    prepare: list[str | Path] = [
        sys.executable,
        "-m",
        "atoll_examples.digits.prepare",
        "--sites",
        "2",
        "--out",
        federation.root,
    ]
    subprocess.run(prepare, check=True, env=federation.environment, capture_output=True)
    start = federation.root / "model.safetensors"
    make: list[str | Path] = [sys.executable, scripts.path, scripts.data("site-1"), "--write-model", start]
    subprocess.run(make, check=True, env=federation.environment)
    run = federation.submit((folder / "job.toml").read_text().replace('"digits"', '"train"'))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    processes = [scripts.execute("site-1", run, notes=False), scripts.execute("site-2", run, torchrun, notes=False)]
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    for process in processes:
        assert ended(process)[0] == 0, process.text()
    model = federation.model(run)
    with np.load(scripts.data("site-1")) as file:
        hidden = np.maximum(file["x_test"] @ model["0.weight"].T + model["0.bias"], 0)
        found = (hidden @ model["2.weight"].T + model["2.bias"]).argmax(1)
        assert float((found == file["y_test"]).mean()) > 0.9


@pytest.mark.chaos
def test_the_updates_of_scripts_are_masked(federation: Federation) -> None:
    """The server sees sums alone: between two rounds each script writes what its agent asks for."""
    sites = ("site-1", "site-2", "site-3")
    scripts = Scripts(federation, ONE_LINE, sites)
    terms = "fewest_survivors = 3, corrupt = 0.0, bound = 4.0, deadline = '30s'"
    text = job(2, STEPS).replace("min = 2", "min = 3") + f"[privacy]\nsecure_aggregation = {{ {terms} }}\n"
    run = federation.submit(text)
    processes = [scripts.execute(site, run) for site in sites]
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    for process in processes:
        assert ended(process)[0] == 0, process.text()
    assert scripts.accuracy(run) > 0.9


@pytest.mark.chaos
def test_what_the_command_has_started_ends_with_it(federation: Federation) -> None:
    scripts = Scripts(federation, ONE_LINE)
    run = federation.submit(job(4, STEPS))
    process = scripts.execute("site-1", run)
    federation.wait_for(lambda: bool(federation.children(process)), "the script", process)
    (script,) = federation.children(process)
    federation.wait_for(lambda: _waits(federation, run), "the script has joined", process)
    process.kill()
    federation.wait_for(lambda: not psutil.pid_exists(script), "the script's end")


def _waits(federation: Federation, run: str) -> bool:
    """Whether the first site has joined, and the run waits for the second."""
    status = json.loads(federation.atoll("site", "status", "--home", federation.home("site-1"), "--json").out)
    return [(one["run"], one["state"]) for one in status["runs"]] == [(run, "ready")]


@pytest.mark.chaos
def test_rounds_are_trained_by_a_script_that_asks_for_them(federation: Federation) -> None:
    scripts = Scripts(federation, BY_ROUNDS)
    more = 'data = "trial"\n[app]\nlr = 0.2\n'
    run = federation.submit(job(3, 'kind = "rounds"', more))
    processes = [scripts.execute(site, run) for site in SITES]
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{federation.logs()}"
    losses = [record["train"]["loss"] for record in state["rounds"]]
    assert losses == sorted(losses, reverse=True)
    assert scripts.accuracy(run) > 0.9
    for process in processes:
        code, text = ended(process)
        assert (code, "after the last round" in text) == (0, True), text
