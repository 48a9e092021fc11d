"""The demo's processes: none outlives the demo, and a failure says where to look."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from atoll.cli.demonstration.crew import Crew, DemoFailed, free_ports


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(tmp_path / "logs", os.environ)


def test_a_command_gives_its_stdout_and_keeps_its_log(crew: Crew) -> None:
    program = "import sys; print(input()); print('word', file=sys.stderr)"
    assert crew.ask("step", [sys.executable, "-c", program], text="token\n") == "token\n"
    assert sorted((crew.logs / "step.log").read_text().split()) == ["token", "word"]


def test_a_command_that_fails_is_named_with_its_last_word_and_its_log(crew: Crew) -> None:
    with pytest.raises(DemoFailed) as caught:
        crew.ask("step", [sys.executable, "-c", "import sys; sys.exit('no room')"])
    assert str(caught.value) == f"step ended with code 1: no room; its log: {crew.logs / 'step.log'}"


def test_a_process_that_ends_by_itself_is_a_failure(crew: Crew) -> None:
    with crew:
        crew.start("server", "server", "run", "/no server here")
        with pytest.raises(DemoFailed, match=r"server ended with code 2: .*no server"):
            crew.await_port("server", free_ports(1)[0])


def test_ports_are_free_and_different() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_processes_end_even_when_the_demo_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys, time
        from pathlib import Path
        from atoll.cli.demonstration import crew as module
        module.atoll_command = lambda *arguments: [sys.executable, "-c", "import time; time.sleep(600)"]
        crew = module.Crew(Path(sys.argv[1]), os.environ)
        crew.start("sleeper")
        print(crew._running["sleeper"].pid, flush=True)
        time.sleep(600)
        """
    )
    demo = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    child = psutil.Process(int(demo.stdout.readline()))
    demo.send_signal(signal.SIGKILL)
    demo.wait()
    child.wait(30)


def test_ctrl_c_in_the_middle_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Python only reports what a hook of `os.register_at_fork` raises, and `logging` has such hooks."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from atoll.cli.demonstration import crew as module
        module.atoll_command = lambda *arguments: [sys.executable, "-c", "import time; time.sleep(600)"]
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
        with module.Crew(Path(sys.argv[1]), os.environ) as crew:
            try:
                crew.start("sleeper")
            except KeyboardInterrupt:
                print(crew.pids()["sleeper"])
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert not psutil.pid_exists(int(done.stdout))
    assert done.stderr == ""
