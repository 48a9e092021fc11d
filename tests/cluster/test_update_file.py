from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from atoll.cluster.update_file import create_update
from atoll.wire.errors import DiskFull, LocalError


def test_holds_what_was_written_even_while_a_tensor_over_it_lives(tmp_path: Path) -> None:
    with create_update(tmp_path / "update", 8) as data:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        tensor.copy_(torch.arange(8))
    assert (tmp_path / "update").read_bytes() == bytes(range(8))


def test_leaves_no_file_behind_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), create_update(tmp_path / "update", 8):
        raise ZeroDivisionError
    assert not (tmp_path / "update").exists()


def test_a_full_disk_is_an_error_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="8 bytes"), create_update(tmp_path / "update", 8):
        pass
    assert not (tmp_path / "update").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be written"), create_update(tmp_path / "no" / "update", 8):
        pass
