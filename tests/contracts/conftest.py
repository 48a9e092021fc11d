from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("atoll.aggregation.testing.reducer_contract")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on many threads only wait for each other, the more the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
