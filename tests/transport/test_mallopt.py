"""The tuning is taken by glibc, refused by nobody, and happens only when called."""

from __future__ import annotations

import os
import subprocess
import sys

_REPORT = "from atoll.transport.mallopt import tune_malloc; print(tune_malloc())"


def test_the_c_library_takes_the_tuning_where_it_is_glibc() -> None:
    process = subprocess.run([sys.executable, "-c", _REPORT], capture_output=True, text=True, check=True)
    is_glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    assert process.stdout.strip() == str(is_glibc)
