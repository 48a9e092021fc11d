"""Local SGD and DiLoCo, with and without fragments, against the same written by hand in torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples.bench import MakeBench
from samples.whole_rounds import Rounds, require_same_bits
from torch import Tensor, nn

from atoll.cluster.batches import batches
from atoll.cluster.run_session import RunSession
from atoll.cluster.seeds import training_seed
from atoll.wire.errors import ConfigError

SITES = {"north": 40, "south": 48}
LR, MOMENTUM = 0.05, 0.9
INNER = {"lr": LR, "momentum": MOMENTUM, "dtype": "float32"}
OUTER = {"kind": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
FINE = {"bound": 1.0}  # so that the sum's quantum is below every digit of these differences
STEPS = 6


class ByHand:
    """DiLoCo as algorithm 1 of Douillard et al. 2023 has it, and with fragments as algorithm 2 of Douillard et al. 2025.

    Each site is a model with an optimizer that is never made anew; the data come in the order of the session's.
    """

    def __init__(self, rounds: Rounds, fragments: list[set[str]], alpha: float = 1.0) -> None:
        self.sessions = rounds.sessions
        self.fragments = fragments
        self.alpha = alpha
        self.shared = {name: nn.Parameter(tensor.clone()) for name, tensor in rounds.tensors(0).items()}
        self.sites = {name: self._site(session) for name, session in self.sessions.items()}
        self.outer = [
            torch.optim.SGD([self.shared[name] for name in sorted(names)], lr=0.7, momentum=0.9, nesterov=True)
            for names in fragments
        ]
        self.round = 0

    def _site(self, session: RunSession) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = session.app.model()
        model.load_state_dict({name: tensor.detach().clone() for name, tensor in self.shared.items()})
        return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def play(self, num_steps: int) -> None:
        self.round += 1
        place = (self.round - 1) % len(self.fragments)
        for site, (model, optimizer) in self.sites.items():
            for x, y in list(self._batches(site))[:num_steps]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # of torch
                optimizer.step()
        with torch.no_grad():
            for name in self.fragments[place]:
                moves = [dict(model.named_parameters())[name] - self.shared[name] for model, _ in self.sites.values()]
                mean = torch.stack([move.double() for move in moves]).sum(0) / len(moves)
                self.shared[name].grad = -mean.float()
            self.outer[place].step()
            for model, _ in self.sites.values():
                for name in self.fragments[place]:
                    own = dict(model.named_parameters())[name]
                    new = self.shared[name]
                    own.copy_(new if self.alpha == 1 else torch.lerp(own.double(), new.double(), self.alpha))

    def _batches(self, site: str) -> Iterator[Any]:
        session = self.sessions[site]
        assert session.training is not None
        seed = training_seed(session.job.job.seed, site, self.round)
        return batches(session.app, session.training.dataset, session.training.work, seed)

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.shared.items()}


def rounds_of(make_bench: MakeBench, schedule: Mapping[str, Any], **strategy: Any) -> Rounds:
    bench = make_bench(
        app=INNER,
        work={"batch_size": 8},
        sites=SITES,
        schedule={"kind": "every_steps", **schedule},
        **{"sum": FINE, **strategy},
    )
    return Rounds(bench, tuple(SITES))


def test_one_fragment_is_diloco_bit_for_bit(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": STEPS}, kind="diloco")
    by_hand = ByHand(rounds, [set(rounds.tensors(0))])
    for _ in range(5):
        rounds.play()
        by_hand.play(STEPS)
        require_same_bits(rounds.tensors(), by_hand.tensors())
    assert not torch.equal(rounds.tensors()["0.weight"], rounds.tensors(0)["0.weight"])


@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_fragments_are_streaming_diloco_bit_for_bit(make_bench: MakeBench, alpha: float) -> None:
    rounds = rounds_of(make_bench, {"steps": STEPS, "fragments": 2, "alpha": alpha}, kind="diloco")
    fragments = [set(fragment.names) for fragment in rounds.sessions["north"].fragments.all]
    assert len(fragments) == 2
    by_hand = ByHand(rounds, fragments, alpha)
    for number in range(7):
        if number == 4:
            rounds.start_again()
        rounds.play()
        by_hand.play(STEPS // 2)
        require_same_bits(rounds.tensors(), by_hand.tensors())


def test_an_update_carries_the_bytes_of_its_fragment_alone(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": 4, "fragments": 2})
    whole = rounds_of(make_bench, {"steps": 4})
    header = 64
    lengths = [len(rounds.train("north", number)[1]) - header for number in (1, 2)]
    (all_bytes,) = [len(whole.train("north", number)[1]) - header for number in (1,)]
    assert sum(lengths) == all_bytes
    assert max(lengths) < 0.7 * all_bytes
    ranges = rounds.sessions["north"].prepared().fragments
    assert [stop - start for start, stop in ranges] == lengths  # float32 either way


def test_a_version_differs_from_the_one_before_in_its_fragment_alone(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": 6, "fragments": 3}, kind="diloco")
    fragments = rounds.sessions["north"].fragments
    for version in range(1, 5):
        rounds.play()
        before, now = rounds.tensors(version - 1), rounds.tensors(version)
        changed = {name for name in now if not torch.equal(now[name], before[name])}
        assert changed == fragments.of_round(version).names


def test_a_round_that_is_done_again_after_a_restart_gives_the_same_bytes(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": 4, "fragments": 2}, kind="diloco")
    for _ in range(3):
        rounds.play()
    before = rounds.train("north", 4)[1]
    rounds.start_again()
    assert rounds.train("north", 4)[1] == before


def test_a_site_that_missed_a_round_takes_up_what_was_exchanged_meanwhile(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": 4, "fragments": 2})
    rounds.play()
    rounds.play(without=("south",))
    session = rounds.sessions["south"]
    seen: dict[str, Tensor] = {}
    session.strategy.rule.begin = lambda model: seen.update({n: t.clone() for n, t in model.state_dict().items()})  # type: ignore[method-assign]
    rounds.train("south", 3)
    require_same_bits(seen, rounds.tensors(2))  # both fragments came anew


def test_the_other_fragments_are_trained_on_at_the_site(make_bench: MakeBench) -> None:
    rounds = rounds_of(make_bench, {"steps": 4, "fragments": 2})
    rounds.play()
    session = rounds.sessions["south"]
    seen: dict[str, Tensor] = {}
    session.strategy.rule.begin = lambda model: seen.update({n: t.clone() for n, t in model.state_dict().items()})  # type: ignore[method-assign]
    rounds.train("south", 2)
    came, own = session.fragments.of_round(1).names, session.fragments.of_round(2).names
    version = rounds.tensors(1)
    assert all(torch.equal(seen[name], version[name]) for name in came)
    assert not any(torch.equal(seen[name], version[name]) for name in own)


def test_one_step_of_plain_sgd_is_the_mean_of_gradients(make_bench: MakeBench) -> None:
    bench = make_bench(
        app={"lr": 0.1, "dtype": "float64"},
        work={"full_batch": True},
        sites={"north": 16, "south": 48},
        schedule={"kind": "every_steps", "steps": 1},
    )
    rounds = Rounds(bench, ("north", "south"))
    model = rounds.sessions["north"].app.model()
    model.load_state_dict(dict(rounds.tensors(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        rounds.play()
        optimizer.zero_grad()
        data = {site: session.training.dataset[:] for site, session in rounds.sessions.items() if session.training}
        loss = sum(len(x) * F.cross_entropy(model(x), y) for x, y in data.values()) / 64
        loss.backward()  # type: ignore[union-attr]  # of torch
        optimizer.step()
        for name, tensor in rounds.tensors().items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-12)


def test_the_state_of_the_inner_optimizer_is_never_reset(make_bench: MakeBench) -> None:
    """Though the app would begin anew each round."""
    rounds = rounds_of(make_bench, {"steps": 4})
    assert not rounds.sessions["north"].app.keeps_optimizer
    rounds.play()
    kept = rounds.sessions["north"].state.load(2)
    assert any(name.startswith("optimizer/") for name in kept.tensors)


def test_more_fragments_than_tensors_are_refused_with_the_bound(make_bench: MakeBench) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.schedule\.fragments = 5: the model has 4 tensors") as caught:
        rounds_of(make_bench, {"steps": 5, "fragments": 5})
    assert caught.value.bound == "1 to 4"
