"""What holds for all tests."""

from __future__ import annotations

import hypothesis

# A busy machine is no failure: no example has a time of its own, only each test has (pyproject.toml).
hypothesis.settings.register_profile("atoll", deadline=None)
hypothesis.settings.load_profile("atoll")
