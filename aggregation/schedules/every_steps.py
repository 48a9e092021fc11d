"""Local SGD over federated sites: rounds that count optimizer steps, and exchange a fragment of the model at a time.

The state table is that of `rounds.py`. What is different is the work of a round, `steps` / `fragments` steps, what a
round exchanges (aggregation/fragments.py), and what goes on at a site from round to round: its optimizer's state, and
with fragments its own model (cluster/own_model.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator, model_validator

from atoll.aggregation.schedule import Exchange
from atoll.aggregation.schedules.rounds import Rounds


class EverySteps(Rounds):
    """Rounds of so many optimizer steps, whose state is never reset: the server's half of DiLoCo (arXiv:2311.08105).

    Local SGD: Stich 2018, arXiv:1805.09767, algorithm 1. DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1.
    With fragments, each is exchanged every `steps` steps, at an offset of its own (streaming DiLoCo, Douillard et al.
    2025, arXiv:2501.18512, algorithm 2, without overlap), and a round is `steps` / `fragments` steps.
    """

    class Options(Rounds.Options):
        steps: int = Field(ge=1, le=100_000_000)  # of a site's optimizer between two exchanges of the same tensor
        fragments: int = Field(default=1, ge=1, le=1024)  # exchanged in turns; a round moves one of them
        overlap: int = Field(default=0, ge=0)  # steps that a site would go on while its fragment travels
        alpha: float = Field(default=1.0, gt=0, le=1)  # weight of the new value of a fragment against the site's own

        @field_validator("overlap")
        @classmethod
        def _waits(cls, overlap: int) -> int:
            if overlap:
                raise ValueError(
                    "wanted 0: a site waits for the outcome of its fragment, since a task starts from a version that is "
                    "committed; take more fragments, which make the wait shorter"
                )
            return overlap

        @model_validator(mode="after")
        def _steps_can_be_shared(self) -> EverySteps.Options:
            if self.steps % self.fragments:
                raise ValueError(f"steps is a multiple of fragments ({self.fragments}): a round has its share of them")
            return self

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.name = "every_steps"
        self.exchange = Exchange(
            steps=options.steps // options.fragments, num_fragments=options.fragments, alpha=options.alpha
        )

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run."""
        return {**super().fixed, "fragments": self.exchange.num_fragments}
