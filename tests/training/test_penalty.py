"""The part of an objective that needs no network: gradients by hand, and beside those that torch finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfill.data.samples import Samples
from fedfill.engines.runner import make_resident
from fedfill.training.fit import Fit, LocalTraining, Penalty, fit
from fedfill.tree import Weights


def plane() -> nn.Module:
    """Two weights (3, -1) and a bias 2, batch norm behind."""
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, -1.0]]))
        model[0].bias.fill_(2.0)
    return model


OTHER: Weights = {
    "0.weight": torch.tensor([[1.0, 4.0]]),
    "0.bias": torch.tensor([2.5]),
    "1.running_mean": torch.ones(1),
}


def gradients(model: nn.Module) -> dict[str, list[float] | None]:
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in model.named_parameters()}


def test_the_gradient_of_the_square_by_hand() -> None:
    # 2 and -5 and -1/2 apart, times 0.5; the running mean is no parameter, and batch norm's own aren't named
    model = plane()
    Penalty(0.5, OTHER).adder(model)()
    assert gradients(model) == {"0.weight": [1.0, -2.5], "0.bias": [-0.25], "1.weight": None, "1.bias": None}


def test_the_gradient_of_the_linear_term_by_hand() -> None:
    model = plane()
    Penalty(slope=OTHER).adder(model)()
    assert gradients(model) == {"0.weight": [1.0, 4.0], "0.bias": [2.5], "1.weight": None, "1.bias": None}


def test_both_are_added_to_what_is_there_and_what_is_frozen_is_left_alone() -> None:
    model = plane()
    model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    add = Penalty(0.5, OTHER, {"0.weight": torch.tensor([[10.0, 20.0]])}).adder(model)
    model[0].weight.grad = torch.tensor([[100.0, 200.0]])  # type: ignore[index, union-attr]
    add()
    assert gradients(model) == {"0.weight": [111.0, 217.5], "0.bias": None, "1.weight": None, "1.bias": None}


def test_nothing_is_done_without_terms() -> None:
    model = plane()
    Penalty(0.0, OTHER).adder(model)()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_is_the_one_with_the_terms_in_its_loss(optimizer: str) -> None:
    """What torch finds where the same terms stand in the loss."""
    stream = torch.Generator().manual_seed(0)
    data = Samples(torch.randn(40, 2, generator=stream), torch.arange(40) % 2)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    weights = {name: torch.randn(w.shape, generator=stream) for name, w in model.state_dict().items()}
    slope = {name: torch.randn(w.shape, generator=stream) for name, w in weights.items()}
    training = LocalTraining(epochs=3, batch_size=8, optimizer=optimizer, learning_rate=0.05)  # type: ignore[arg-type]

    def plain(model: nn.Module, batch, context) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return nn.functional.cross_entropy(model(batch.inputs), batch.labels)

    def whole(model: nn.Module, batch, context) -> torch.Tensor:  # type: ignore[no-untyped-def]
        terms = [0.15 * (p - weights[n]).square().sum() + (p * slope[n]).sum() for n, p in model.named_parameters()]
        return plain(model, batch, context) + sum(terms)

    found = [
        fit(make_resident(model, torch.device("cpu")), request, torch.Generator().manual_seed(1), torch.Generator())
        for request in (
            Fit(weights, plain, data, training, penalty=Penalty(0.3, weights, slope)),
            Fit(weights, whole, data, training),
        )
    ]
    for name in weights:
        assert torch.allclose(found[0].weights[name], found[1].weights[name], atol=1e-5)
        assert not torch.allclose(found[0].weights[name], weights[name], atol=1e-2)
