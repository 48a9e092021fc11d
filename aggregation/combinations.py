"""Which parts go together. Each cell of the table either runs in a test or is refused here, at planning, with a reason.

The table is the product of all built-in kinds; `refusal` decides a cell by what its parts declare (is the codec
additive, does the reducer need a sum), so it holds for plugins too. `tests/aggregation/test_combinations.py` runs
every cell that is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.combined import Combined as Combined  # noqa: PLC0414  named from here by all others
from atoll.aggregation.combined import Refusal
from atoll.aggregation.masking import MASKED
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.reducers.central import FLTrust
from atoll.aggregation.reducers.mean import Mean
from atoll.aggregation.rules.feddyn import FedDyn, FedDynOptimizer
from atoll.aggregation.rules.fednova import FedNova
from atoll.aggregation.rules.personal import Personal
from atoll.aggregation.rules.rule import Paired
from atoll.aggregation.schedule import Asynchronous, Branching, Schedule, Stepped
from atoll.aggregation.schedules.cyclic import Cyclic
from atoll.aggregation.schedules.gossip import Gossip
from atoll.aggregation.server_optimizers import ServerOptimizer, Sgd
from atoll.wire.errors import ConfigError

REFUSALS: Final[tuple[Refusal, ...]] = (
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: combined.schedule.fewest_updates < combined.reducer.fewest_updates,
        reason="with so few updates this reducer promises nothing; raise min and quorum in the schedule, or let the "
        "reducer bear fewer faulty sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.schedule, Asynchronous) and combined.reducer.needs != "sum",
        reason="this schedule discounts stale updates in a sum, and this reducer compares updates, which no discount "
        "makes comparable; take the reducer mean or norm_bound",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: (
            isinstance(combined.reducer, Append) and isinstance(combined.schedule, Branching | Stepped | Cyclic)
        ),
        reason="this schedule counts optimizer steps, or asks groups or one site at a time, and payloads are appended once "
        "a round, for all sites; take the schedule rounds",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.reducer, FLTrust) and _samples(combined.schedule),
        reason="the trusted site has to be in every round, and this schedule draws some of the sites; set fraction = 1, "
        "and over = 1",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.reducer"),
        applies=lambda combined: combined.reducer.needs == "sum" and not combined.codec.additive,
        reason="this reducer sums updates as they come, and sums of this codec's values mean nothing; "
        "take an additive codec (native, float32, bfloat16, int8, int4, top_k, random_k)",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.reducer"),
        applies=lambda combined: _is_difference(combined) and not isinstance(combined.reducer, Mean),
        reason="difference coding adds up what sites send, which is the mean of what they mean only under the reducer "
        "mean; take that, or error_feedback in place of difference",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.schedule"),
        applies=lambda combined: _is_difference(combined) and not _takes_all(combined),
        reason="with difference coding the server adds up every site's changes, so it must have all of them in every "
        "round; name the sites in job.sites, set min to their number and leave quorum out, or take error_feedback in "
        "place of difference",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.optimizer"),
        applies=lambda combined: _is_difference(combined) != _adds_up(combined),
        reason="difference coding needs a server that adds up changes, and nothing else may: "
        'take optimizer = { kind = "sgd", momentum = 1 } with it, and a momentum below 1 without it',
    ),
    Refusal(
        keys=("strategy.codec", "regions"),
        applies=lambda combined: combined.regions and feedback_of(combined.codec) != "none",
        reason="a site carries over what was left out of updates that count, and below a region it does not learn "
        "whether the region's sum counted; set error_feedback = false, or name sites of this federation alone in "
        "job.sites",
    ),
    Refusal(
        keys=("strategy.buffers", "evaluation.server"),
        applies=lambda combined: combined.buffers == "local" and combined.server_evaluation,
        reason="with local buffers the server's model keeps those it began with, so the server would judge a model "
        "that no site uses; set evaluation.server = false, or buffers = mean",
    ),
    Refusal(
        keys=("strategy.local", "evaluation.server"),
        applies=lambda combined: bool(combined.local) and combined.server_evaluation,
        reason="the server's model keeps the values that these tensors began with, so the server would judge a model "
        "that no site uses; set evaluation.server = false",
    ),
    Refusal(
        keys=("strategy.reducer", "regions"),
        applies=lambda combined: combined.regions and combined.reducer.needs != "sum",
        reason="a region sends the sum of its sites' updates, and this reducer needs each update by itself; take the "
        "reducer mean, or name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: combined.regions and isinstance(combined.schedule, Asynchronous),
        reason="a region sends one sum for a round, so that its sites cannot be of several rounds; take the schedule "
        "rounds, or name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.download"),
        applies=lambda combined: _num_fragments(combined.schedule) > 1 and combined.download is not None,
        reason="a site fetches the bytes of one fragment of a version, and a codec of downloads writes versions whole; "
        "remove download, or set fragments = 1",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: combined.regions and _num_fragments(combined.schedule) > 1,
        reason="a region hands versions on to its sites whole, and its sums are of the whole model; set fragments = 1, or "
        "name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: combined.regions and isinstance(combined.schedule, Branching),
        reason="a region is a group already, and hands one version on to all of its sites; take the schedule rounds, or "
        "name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: combined.regions and isinstance(combined.schedule, Cyclic),
        reason="a turn is that of one site, and a region sends the sum of several; take the schedule rounds, or name "
        "sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.download", "regions"),
        applies=lambda combined: combined.regions and combined.download is not None,
        reason="a region hands versions on to its sites as it gets them, in full; remove download, or name sites of "
        "this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.rule"),
        applies=lambda combined: (
            isinstance(combined.schedule, Branching | Cyclic) and isinstance(combined.rule, Paired)
        ),
        reason="what the server keeps for this rule is one mean over all sites, and here a version is of some of them: "
        "of a group, or of one site; take the schedule rounds, or the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.rule"),
        applies=lambda combined: _goes_on(combined.schedule) and isinstance(combined.rule, Paired),
        reason="this rule follows whole updates from the version that they began with, and here a site trains its own "
        "model on; set fragments = 1 and alpha = 1, or take the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.rule"),
        applies=lambda combined: _counts_steps(combined.schedule) and isinstance(combined.rule, FedNova),
        reason="this rule's formula begins every round with a fresh optimizer, and here its state goes on; take the "
        "schedule rounds, or another rule",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.codec"),
        applies=lambda combined: _goes_on(combined.schedule) and feedback_of(combined.codec) != "none",
        reason="what an update leaves out stays in the model that a site trains on, so it would be sent twice; set "
        "fragments = 1 and alpha = 1, or error_feedback = false in the codec",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.codec"),
        applies=lambda combined: (
            isinstance(combined.schedule, Branching) and feedback_of(combined.codec) == "difference"
        ),
        reason="difference coding adds up all sites' changes in one version, and each group has one of its own; take "
        "error_feedback in place of difference",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.rule"),
        applies=lambda combined: isinstance(combined.schedule, Asynchronous) and isinstance(combined.rule, Paired),
        reason="this schedule counts a stale update in part, and what this rule keeps at the sites must move by all of "
        "what the server adds; take the schedule rounds, or the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.reducer", "strategy.rule"),
        applies=lambda combined: isinstance(combined.rule, Paired) and not isinstance(combined.reducer, Mean),
        reason="the server's part of this rule is the mean of what sites send, and this reducer leaves some of that "
        "out; take the reducer mean, or the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.rule"),
        applies=lambda combined: isinstance(combined.rule, Paired) and feedback_of(combined.codec) != "none",
        reason="this rule keeps at the site what the codec left of an update, and sends the rest again by itself; a "
        "codec with feedback would send it twice: take feedback from the codec, or the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.rule", "strategy.optimizer"),
        applies=lambda combined: isinstance(combined.rule, FedDyn) != isinstance(combined.optimizer, FedDynOptimizer),
        reason="FedDyn has a part at the sites and one at the server; take feddyn for both, as strategy.kind = "
        "feddyn does, or for none",
    ),
    Refusal(
        keys=("strategy.personal", "evaluation.sites"),
        applies=lambda combined: _is_made_to_be_judged(combined.personal) and not combined.site_evaluation,
        reason="this personal model is made when a site judges a version, and no site does; set evaluation.sites = "
        "true, or personal to none or ditto",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.reducer.name != "mean",
        reason="a version of gossip is the mean of the sites' models, which have mixed without a reducer; take the "
        "reducer mean",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.optimizer"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and not _adds(combined.optimizer),
        reason="versions of gossip are not sent back to the sites, so an optimizer on the server would move a model "
        "that no site has; take sgd with lr = 1 and no momentum",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.buffers"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.buffers == "local",
        reason="sites give their neighbours whole models, and local buffers would leave with them; take mean or first",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.local"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and bool(combined.local),
        reason="sites give their neighbours whole models, and what is to stay would leave with them; remove local",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.download"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.download is not None,
        reason="a version would be the mean of models less what the codec left out of the version before; remove download",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.regions,
        reason="a region has no model of its own that it could mix; name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.rule"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and isinstance(combined.rule, Paired),
        reason="this rule has a part at the server, which versions carry to the sites, and sites of gossip begin with what "
        "they have mixed; take the rule none or fedprox",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.codec"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and feedback_of(combined.codec) != "none",
        reason="a site sends all of its model's difference to the version each time, so that nothing is left to carry "
        "over; set error_feedback = false, and difference too",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.personal"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and _is_personal(combined.personal),
        reason="each site of gossip has a model of its own already, and a personal one is made from versions that no site "
        "begins with; remove personal",
    ),
    *MASKED,
)


def _is_personal(personal: Personal | None) -> bool:
    return personal is not None and personal.name != "none"


def _is_made_to_be_judged(personal: Personal | None) -> bool:
    return personal is not None and _is_personal(personal) and not personal.keeps


def _is_difference(combined: Combined) -> bool:
    return feedback_of(combined.codec) == "difference"


def _takes_all(combined: Combined) -> bool:
    """Whether no round can close without every site that the job names, and no other can be in one."""
    return combined.num_named > 0 and combined.schedule.fewest_updates == combined.num_named


def _adds_up(combined: Combined) -> bool:
    return isinstance(combined.optimizer, Sgd) and combined.optimizer.momentum == 1


def _samples(schedule: Schedule[Any]) -> bool:
    """Whether a round may close without some of the members. A plugin says so by `draws`, or has a `fraction`."""
    fraction = float(getattr(getattr(schedule, "options", None), "fraction", 1.0))
    return bool(getattr(schedule, "draws", fraction < 1))


def _goes_on(schedule: Schedule[Any]) -> bool:
    """Whether a site trains on in a model of its own, which the version does not replace as a whole."""
    return isinstance(schedule, Stepped) and (schedule.exchange.num_fragments > 1 or schedule.exchange.alpha < 1)


def _counts_steps(schedule: Schedule[Any]) -> bool:
    return isinstance(schedule, Stepped) and schedule.exchange.steps is not None


def _num_fragments(schedule: Schedule[Any]) -> int:
    return schedule.exchange.num_fragments if isinstance(schedule, Stepped) else 1


def _adds(optimizer: ServerOptimizer | None) -> bool:
    """Whether a version is the one before and the mean difference."""
    return optimizer is None or (isinstance(optimizer, Sgd) and optimizer.adds)


def refusal(combined: Combined) -> Refusal | None:
    """Why these parts do not go together; None where they do."""
    return next((refusal for refusal in REFUSALS if refusal.applies(combined)), None)


def require_allowed(combined: Combined, values: Mapping[str, Any]) -> None:
    """Returns where the parts go together; `values` are the job's, by key, for the message.

    Raises:
        ConfigError: names both keys, their values and the reason.
    """
    found = refusal(combined)
    if found is None:
        return
    pair = " with ".join(f"{key} = {values[key]!r}" for key in found.keys)
    raise ConfigError(
        f"{pair}: {found.reason}", key=found.keys[0], value=str(values[found.keys[0]]), bound=found.reason
    )
