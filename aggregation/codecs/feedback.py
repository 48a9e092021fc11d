"""What a site does about the part of a difference that its codec left out: options that lossy codecs have in common.

v is what is encoded, C(v) what the server reads, d the difference of this round, and m what the site carries over.

* **error feedback** (Stich et al. 2018, arXiv:1809.07599, algorithm 1; Karimireddy et al. 2019, arXiv:1901.09847,
  algorithm 2): v = d + m, then m = v - C(v). What a round left out goes with the next one.
* **difference coding** (EF21, Richtarik et al. 2021, arXiv:2106.05203, algorithm 2): v = d - m, then m = m + C(v).
  What travels is the change since the site's last update. The server keeps the mean of all m alone, as the momentum
  of its optimizer, so every site must take part in every round.

Both need a C that contracts, E ||v - C(v)||^2 <= (1 - delta) ||v||^2 with delta > 0: top_k and unscaled random_k have
delta = k / n, int8 0.98 and int4 0.67 or more (a quarter of the squared step for each value of a group). m begins at 0.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from atoll.aggregation.codecs.encoding import Feedback
from atoll.wire.job import Strict


class FeedbackOptions(Strict):
    """Which of the two; `error_feedback` where nothing else is said is up to the codec."""

    error_feedback: bool = False
    difference: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.difference and self.error_feedback and "error_feedback" in self.model_fields_set:
            raise ValueError("give error_feedback or difference, not both: each takes care of what the other would")
        return self

    @property
    def feedback(self) -> Feedback:
        if self.difference:
            return "difference"
        return "error" if self.error_feedback else "none"
