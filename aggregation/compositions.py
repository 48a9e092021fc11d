"""Strategies by name: literal tables of parts. A job may replace any part, or only options of one.

A new combination needs no class: a plugin's entry point in `atoll.strategies` gives a `Composition` like these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PARTS: Final = ("schedule", "rule", "codec", "reducer", "optimizer", "personal")

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "schedule": {"kind": "rounds"},
    "rule": {"kind": "none"},
    "codec": {"kind": "native"},
    "reducer": {"kind": "mean"},
    "optimizer": {"kind": "sgd", "lr": 1.0},
    "personal": {"kind": "none"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A named strategy. `parts` holds those that differ from fedavg's: a kind, and options that differ from its own."""

    summary: str  # one sentence, with paper
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def part(self, name: str) -> dict[str, Any]:
        """Kind and options of one part."""
        return dict(self.parts.get(name, _DEFAULTS[name]))


BUILT_IN: Final[Mapping[str, Composition]] = {
    "fedavg": Composition(
        summary="Rounds of local training, then the mean weighted by examples "
        "(McMahan et al. 2016, arXiv:1602.05629, algorithm 1)."
    ),
    "fedprox": Composition(
        summary="FedAvg whose local loss pulls back to the base model, for uneven sites "
        "(Li et al. 2018, arXiv:1812.06127, algorithm 2).",
        parts={"rule": {"kind": "fedprox", "mu": 0.01}},
    ),
    "fedavgm": Composition(
        summary="FedAvg with momentum on the server (Hsu et al. 2019, arXiv:1909.06335, section 4.3).",
        parts={"optimizer": {"kind": "sgd", "lr": 1.0, "momentum": 0.9}},
    ),
    "fedadam": Composition(
        summary="FedAvg with Adam on the server (Reddi et al. 2020, arXiv:2003.00295, algorithm 2).",
        parts={"optimizer": {"kind": "adam", "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3}},
    ),
    "fedbuff": Composition(
        summary="Versions from the first k updates to come, stale ones discounted (Nguyen et al. 2021, "
        "arXiv:2106.06639, algorithm 1).",
        parts={"schedule": {"kind": "buffered", "k": 2}},
    ),
    "fedasync": Composition(
        summary="A version from every update, stale ones discounted as in Xie et al. 2019 (arXiv:1903.03934); the "
        "difference to an update's own base is added, where algorithm 1 there mixes whole models.",
        parts={"schedule": {"kind": "buffered", "k": 1}, "optimizer": {"kind": "sgd", "lr": 0.5}},
    ),
    "ef21": Composition(
        summary="FedAvg in which sites send the largest parts of what changed since their last update "
        "(Richtarik et al. 2021, arXiv:2106.05203, algorithm 2); for sites that job.sites names, all in every round.",
        parts={
            "codec": {"kind": "top_k", "difference": True},
            "optimizer": {"kind": "sgd", "lr": 1.0, "momentum": 1.0},
        },
    ),
    "cyclic": Composition(
        summary="Weight transfer: one site after the other trains the version of the one before it (Chang et al. 2018, "
        "doi:10.1093/jamia/ocy017).",
        parts={"schedule": {"kind": "cyclic"}},
    ),
    "local_sgd": Composition(
        summary="Sixteen optimizer steps at each site, then the mean; no optimizer is reset (Stich 2018, "
        "arXiv:1805.09767, algorithm 1).",
        parts={"schedule": {"kind": "every_steps", "steps": 16}},
    ),
    "diloco": Composition(
        summary="Local SGD whose mean difference moves the model by Nesterov momentum (Douillard et al. 2023, "
        "arXiv:2311.08105, algorithm 1; fragments as in Douillard et al. 2025, arXiv:2501.18512).",
        parts={
            "schedule": {"kind": "every_steps", "steps": 500},
            "optimizer": {"kind": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
        },
    ),
    "fedadagrad": Composition(
        summary="FedAvg with Adagrad on the server (Reddi et al. 2020, arXiv:2003.00295, algorithm 2).",
        parts={"optimizer": {"kind": "adagrad", "lr": 0.01, "eps": 1e-3}},
    ),
    "fedyogi": Composition(
        summary="FedAvg with Yogi on the server (Reddi et al. 2020, arXiv:2003.00295, algorithm 2).",
        parts={"optimizer": {"kind": "yogi", "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3}},
    ),
    "scaffold": Composition(
        summary="FedAvg whose local gradients are corrected by control variates, for sites whose data differ "
        "(Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1).",
        parts={"rule": {"kind": "scaffold"}},
    ),
    "feddyn": Composition(
        summary="FedAvg with a regulariser at each site that follows what it has learnt "
        "(Acar et al. 2021, arXiv:2111.04263, algorithm 1).",
        parts={"rule": {"kind": "feddyn", "alpha": 0.01}, "optimizer": {"kind": "feddyn"}},
    ),
    "fednova": Composition(
        summary="FedAvg of differences by local step, for sites that make more or fewer of them "
        "(Wang et al. 2020, arXiv:2007.07481, section 4).",
        parts={"rule": {"kind": "fednova"}},
    ),
    "ditto": Composition(
        summary="FedAvg, and at each site a model of its own that is pulled to the global one "
        "(Li et al. 2021, arXiv:2012.04221, algorithm 1).",
        parts={"personal": {"kind": "ditto", "lam": 0.1}},
    ),
    "bagging": Composition(
        summary="Payloads of an opaque app, such as trees, appended round by round (Breiman 1996, Machine Learning 24; "
        "Chen, Guestrin 2016, arXiv:1603.02754, for the trees of the example).",
        parts={"reducer": {"kind": "append"}},
    ),
}
