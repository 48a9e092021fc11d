"""Values that hold from a round on, until others do: what `control.override` makes of each part of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class ByRound(Generic[T]):
    """`stages` are (first round, value), by rising round; the first one holds before its round too."""

    stages: tuple[tuple[int, T], ...]

    @classmethod
    def always(cls, value: T) -> ByRound[T]:
        """One value for all rounds."""
        return cls(((1, value),))

    @property
    def first(self) -> T:
        return self.stages[0][1]

    def at(self, round_: int) -> T:
        """The value of a round."""
        return next((value for begin, value in reversed(self.stages) if begin <= round_), self.first)

    def map(self, function: Callable[[T], U]) -> ByRound[U]:
        """What `function` makes of each value, in the same rounds."""
        return ByRound(tuple((begin, function(value)) for begin, value in self.stages))

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self.stages)
