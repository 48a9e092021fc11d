"""What holds for all tests."""

from __future__ import annotations

import signal

import hypothesis

# A busy machine is no failure: no example has a time of its own, only each test has (pyproject.toml).
hypothesis.settings.register_profile("atoll", deadline=None)
hypothesis.settings.load_profile("atoll")

# A shell starts what it puts in the background with Ctrl-C ignored, and every process below inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
