"""What the user writes whose model is no tensors: payloads that Atoll carries, in order, and never looks into.

Trees are the first use: every site adds some in each round (strategy `bagging`), and the model is all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel


class OpaqueApp(ABC):
    """A model that grows by payloads: subclass it and register the class under the entry-point group `atoll.apps`.

    `config` and `source` are as in `App`. A payload is bytes of the app's own making, such as trees in a format that
    cannot run code: sites read each other's.
    """

    Config: ClassVar[type[BaseModel]] = BaseModel

    def __init__(self, config: Any, source: Mapping[str, Any]) -> None:
        self.config, self.source = config, source

    @abstractmethod
    def train(self, payloads: Sequence[bytes], seed: int) -> bytes:
        """This site's payload of one round, 1 byte to the job's `max_bytes`.

        Args:
            payloads: of all rounds so far, and in a round by the sites' names; none in the first round.
            seed: of everything random in it; another one for each site and round.
        """

    @abstractmethod
    def evaluate(self, payloads: Sequence[bytes]) -> Mapping[str, tuple[float, float]]:
        """Sum and count of each metric on this machine's test data; none where it has no such data."""
