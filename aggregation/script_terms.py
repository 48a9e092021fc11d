"""What a strategy may ask of a script, whose loop and state are its own: to train from a version and to say how far it came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.schedules.gossip import Gossip
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job

if TYPE_CHECKING:
    from atoll.aggregation.strategy import Strategy


def require_scriptable(job: Job, strategy: Strategy) -> None:
    """Returns where a script can do the job's part at a site.

    Raises:
        ConfigError: names the key, its value and why a script cannot.
    """
    exchange, feedback = strategy.exchange, feedback_of(strategy.codec)
    keeps = "keeps state at a site between rounds, which only the loop of an app does in this version"
    parts = "moves a part of the model, and a script exchanges the whole one in this version"
    refusals = (
        ("strategy.rule.kind", strategy.rule.name, "none", strategy.rule.name != "none", keeps),
        ("strategy.codec", f"{strategy.codec.name}, feedback: {feedback}", "none", feedback != "none", keeps),
        ("strategy.download", "a codec", "absent", strategy.download is not None, keeps),
        ("strategy.local", ", ".join(strategy.local), "absent", bool(strategy.local), keeps),
        ("strategy.buffers", strategy.buffers, "mean or first", strategy.buffers == "local", keeps),
        (
            "strategy.personal",
            "a model of the site's own",
            "absent",
            strategy.personal.work(strategy.work) is not None,
            keeps,
        ),
        ("strategy.parameters", "trainable", "all", job.strategy.parameters == "trainable", parts),
        ("strategy.schedule.fragments", exchange.num_fragments, 1, exchange.num_fragments > 1, parts),
        ("strategy.schedule.alpha", exchange.alpha, 1, exchange.alpha < 1, keeps),
        (
            "strategy.schedule.kind",
            "gossip",
            "another",
            isinstance(strategy.schedule, Gossip),
            "has sites mix models, which only the loop of an app does in this version",
        ),
        (
            "strategy.reducer.kind",
            "append",
            "another",
            isinstance(strategy.reducer, Append),
            "is of payloads, which only an OpaqueApp makes",
        ),
    )
    for key, value, wanted, applies, reason in refusals:
        if applies:
            raise ConfigError(
                f"{key} = {value} with job.script = {job.job.script!r}: that {reason}; wanted {wanted}",
                key=key,
                value=str(value),
                bound=str(wanted),
            )
