from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.measures import Divergence, cosine_distance
from sglang_morph.profiling.model import LayeredModel, Weights
from sglang_morph.profiling.ranking import Ladder, Ranking, Search, rank
from sglang_morph.profiling.scores import LisWeights
from sglang_morph.profiling.trajectory import Trajectory
from sglang_morph.profiling.variants import make_variants

VARIANTS = ("int8", "int4")
LAYERS = range(4)


@pytest.fixture(scope="module")
def ladder(llama: LayeredModel, token_ids: torch.Tensor) -> Ladder:
    made = list(make_variants(llama, VARIANTS, AsTheyAre(), token_ids))
    weights = {name: [one.weights for one in made if one.name == name] for name in VARIANTS}
    sizes = {name: [one.nbytes for one in made if one.name == name] for name in VARIANTS}
    full = [sum(weight.nbytes for weight in llama.weights(layer).values()) for layer in LAYERS]
    steps = itertools.pairwise([full, sizes["int8"], sizes["int4"]])
    freed = [[a - b for a, b in zip(before, after, strict=True)] for before, after in steps]
    return Ladder(weights, dict(zip(VARIANTS, freed, strict=True)))


@pytest.fixture
def evaluations(tmp_path: Path) -> Evaluations:
    return Evaluations(tmp_path / "evaluations.jsonl", "test")


class Exchanged:
    """The model with some layers exchanged, computed as a whole every time."""

    def __init__(self, model: LayeredModel, token_ids: torch.Tensor) -> None:
        self.model = model
        self._token_ids = token_ids

    def states(self, weights: dict[int, Weights]) -> list[torch.Tensor]:
        for layer, one in weights.items():
            self.model.swap(layer, one)
        states = [self.model.embed(self._token_ids)]
        for layer in range(self.model.num_layers):
            states.append(self.model.layer(layer, states[-1]))
        for layer in weights:
            self.model.unswap(layer)
        return states


def plain_order(
    ladder: Ladder, harm: Callable[[dict[int, Weights], dict[int, Weights], int, Weights], float]
) -> dict[str, list[int]]:
    """`harm(weights now, weights as the stage began, layer, its weights then)` of everyone."""
    now: dict[int, Weights] = {}
    orders: dict[str, list[int]] = {}
    for variant in VARIANTS:
        orders[variant] = []
        begin = dict(now)
        while len(orders[variant]) < len(LAYERS):
            left = [layer for layer in LAYERS if layer not in orders[variant]]
            weights = ladder.weights[variant]
            best = min(left, key=lambda x: harm(now, begin, x, weights[x]))
            orders[variant].append(best)
            now[best] = weights[best]
    return orders


@pytest.mark.parametrize("shares", [LisWeights(), LisWeights(0, 0, 1), LisWeights(1, 5, 0)])
def test_lis_order_is_that_of_the_formula(
    llama: LayeredModel,
    token_ids: torch.Tensor,
    ladder: Ladder,
    evaluations: Evaluations,
    shares: LisWeights,
) -> None:
    whole = Exchanged(llama, token_ids)

    def similar(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(cosine_similarity(a.double(), b.double(), dim=-1).mean())

    def harm(now: dict, begin: dict, layer: int, weights: Weights) -> float:
        states = whole.states(begin)
        with llama.replaced(layer, weights):
            exchanged = llama.layer(layer, states[layer])
        before, after = whole.states(now)[-1], whole.states(now | {layer: weights})[-1]
        lis = (
            shares.transformation * similar(states[layer], states[layer + 1])
            + shares.replacement * similar(states[layer + 1], exchanged)
            + shares.model * similar(llama.normed(before), llama.normed(after))
        )
        return -lis

    found = rank(llama, token_ids, ladder, Search("lis", shares), evaluations)
    assert found.orders() == plain_order(ladder, harm)


def test_kl_order_is_that_of_whole_forwards(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, evaluations: Evaluations
) -> None:
    whole = Exchanged(llama, token_ids)
    p = llama.logits(whole.states({})[-1]).double().log_softmax(-1)

    def harm(now: dict, begin: dict, layer: int, weights: Weights) -> float:
        output = whole.states(now | {layer: weights})[-1]
        q = llama.logits(output).double().log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    found = rank(llama, token_ids, ladder, Search("kl"), evaluations)
    assert found.orders() == plain_order(ladder, harm)


@pytest.mark.parametrize("order", ["lis", "kl", "contiguous"])
def test_batches_change_nothing_and_the_model_is_left_as_loaded(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, tmp_path: Path, order: str
) -> None:
    before = llama.forward(token_ids)
    one, four = (
        rank(llama, token_ids, ladder, Search(order, batch=n), Evaluations(tmp_path / str(n), "x"))
        for n in (1, 4)
    )
    assert one.orders() == four.orders()
    assert torch.equal(llama.forward(token_ids), before)


def test_forwards_are_counted(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, evaluations: Evaluations
) -> None:
    calls = 0
    layer = llama.layer

    def counted(index: int, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += hidden.shape[0] // token_ids.shape[0]
        return layer(index, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "layer", counted)
        found = rank(llama, token_ids, ladder, Search("kl", batch=3), evaluations)
    assert found.full_forwards == calls / 4
    assert found.full_forwards_plain == 20
    assert found.candidates == 20
    # Layers before a candidate are not computed again; how many those are depends on the order.
    assert found.forwards_saved_ratio > 0.1


class Killed(Exception):
    pass


@pytest.mark.parametrize("order", ["lis", "kl"])
@pytest.mark.parametrize("after", [1, 9, 17])
def test_a_killed_run_goes_on(
    llama: LayeredModel,
    token_ids: torch.Tensor,
    ladder: Ladder,
    tmp_path: Path,
    order: str,
    after: int,
) -> None:
    search = Search(order, LisWeights(0, 0, 1))  # without a floor, so that all is measured
    whole = rank(llama, token_ids, ladder, search, Evaluations(tmp_path / "whole", "x"))

    path = tmp_path / "killed"
    put, done = Evaluations.put, 0

    def put_or_die(self: Evaluations, *arguments: object) -> None:
        nonlocal done
        if done == after:
            raise Killed
        done += 1
        put(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluations, "put", put_or_die)
        with pytest.raises(Killed):
            rank(llama, token_ids, ladder, search, Evaluations(path, "x"))
    with path.open("ab") as file:
        file.write(b'{"type":"evaluation","vari')  # as a killed process may leave it

    resumed = Evaluations(path, "x")
    assert len(resumed) == after
    again = rank(llama, token_ids, ladder, search, resumed)
    assert again.stages == whole.stages
    lines = (tmp_path / "whole").read_bytes().count(b"\n")
    assert path.read_bytes().count(b"\n") == lines  # nothing was measured twice

    finished = Evaluations(path, "x")
    calls = Trajectory.trials
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trajectory, "trials", lambda *_: pytest.fail("measured again"))
        assert rank(llama, token_ids, ladder, search, finished).stages == whole.stages
    assert Trajectory.trials is calls


def test_evaluations_of_something_else_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "evaluations"
    first = Evaluations(path, "one text")
    first.put("int8", "kl", (1, 2), 0, 0.25, 3)
    assert Evaluations(path, "one text").get("int8", "kl", (1, 2), 0) == 0.25
    assert Evaluations(path, "another text").get("int8", "kl", (1, 2), 0) is None
    assert len(Evaluations(path, "one text")) == 0
    with pytest.raises(ValueError, match="layer 0 in int8 yields nan"):
        first.put("int8", "kl", (), 0, float("nan"), 1)


@pytest.mark.parametrize("order", ["front", "back", "random"])
def test_fixed_orders_measure_nothing(
    llama: LayeredModel,
    token_ids: torch.Tensor,
    ladder: Ladder,
    evaluations: Evaluations,
    order: str,
) -> None:
    found = rank(llama, token_ids, ladder, Search(order, seed=3), evaluations)
    same = rank(llama, token_ids, ladder, Search(order, seed=3), evaluations)
    assert found == same
    expected = {"front": [0, 1, 2, 3], "back": [3, 2, 1, 0]}
    for layers in found.orders().values():
        assert layers == expected.get(order, layers)
        assert sorted(layers) == list(LAYERS)
    assert len(evaluations) == 0


def test_random_orders_differ_by_seed(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, evaluations: Evaluations
) -> None:
    def order(seed: int) -> Ranking:
        return rank(llama, token_ids, ladder, Search("random", seed=seed), evaluations)

    assert len({str(order(seed).orders()) for seed in range(8)}) > 4


def test_unknown_orders(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, evaluations: Evaluations
) -> None:
    with pytest.raises(ValueError, match="unknown order 'middle'; use one of lis, kl"):
        rank(llama, token_ids, ladder, Search("middle"), evaluations)


def test_distances() -> None:
    a = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    b = a + 1e-4 * a.flip(-1)
    exact = 1 - cosine_similarity(a.double(), b.double(), dim=-1).mean()
    assert cosine_distance(a, b) == pytest.approx(float(exact), rel=1e-3)
    assert cosine_distance(a, 7 * a) == pytest.approx(0, abs=1e-14)


def test_divergence(llama: LayeredModel, token_ids: torch.Tensor) -> None:
    output = llama.forward(token_ids)
    divergence = Divergence(llama, output)
    assert divergence(output) == pytest.approx(0, abs=1e-7)
    p, q = (llama.logits(x).double().softmax(-1) for x in (output, output + 0.1))
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert divergence(output + 0.1) == pytest.approx(expected, rel=1e-4)


def test_bytes_freed_price_the_divergence(
    llama: LayeredModel, token_ids: torch.Tensor, ladder: Ladder, tmp_path: Path
) -> None:
    """A layer that frees a thousand times as much goes first, whatever it costs."""
    plain = rank(llama, token_ids, ladder, Search("kl"), Evaluations(tmp_path / "plain", "x"))
    last = plain.stages[0].layers[-1]
    freed = [1000 * n if i == last else n for i, n in enumerate(ladder.freed["int8"])]
    priced = dataclasses.replace(ladder, freed=ladder.freed | {"int8": freed})
    found = rank(llama, token_ids, priced, Search("kl"), Evaluations(tmp_path / "priced", "x"))
    assert found.stages[0].layers[0] == last
