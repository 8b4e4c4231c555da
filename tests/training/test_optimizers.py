from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.training.optimizers import Optimizer, Rule

RULES = {
    "sgd": (Rule("sgd", 0.1), lambda p, **form: torch.optim.SGD(p, 0.1, **form)),
    "sgd with momentum": (
        Rule("sgd", 0.1, momentum=0.9, weight_decay=0.01),
        lambda p, **form: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, **form),
    ),
    "adam": (
        Rule("adam", 0.01, weight_decay=0.1),
        lambda p, **form: torch.optim.Adam(p, 0.01, weight_decay=0.1, **form),
    ),
    "adamw": (
        Rule("adamw", 0.01, weight_decay=0.1),
        lambda p, **form: torch.optim.AdamW(p, 0.01, weight_decay=0.1, **form),
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def walk(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(8, 5, generator=draws), torch.randint(3, (8,), generator=draws)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_the_bits_are_those_of_torchs_classes(name: str, fused: bool) -> None:
    rule, theirs = RULES[name]
    ours, reference = network(), network()
    rule = Rule(rule.kind, rule.learning_rate, rule.momentum, rule.weight_decay, fused)
    expected = walk(reference, theirs(reference.parameters(), fused=fused or None), range(20))
    found = walk(ours, Optimizer(list(ours.parameters()), rule), range(20))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_goes_on_from_another_ones_momenta(name: str) -> None:
    rule, _ = RULES[name]
    whole, parted = network(), network()
    expected = walk(whole, Optimizer(list(whole.parameters()), rule), range(8))
    first = Optimizer(list(parted.parameters()), rule)
    walk(parted, first, range(4))
    kept = {k: {part: x.clone() for part, x in of.items()} for k, of in first.momenta.items()}
    found = walk(parted, Optimizer(list(parted.parameters()), rule, first.momenta), range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(first.momenta[k][part], x) for k, of in kept.items() for part, x in of.items())


def test_parameters_without_a_gradient_stay_and_are_not_counted() -> None:
    moved, still = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Optimizer([still, moved], Rule("adam", 0.5, weight_decay=0.1))
    moved.sum().backward()
    optimizer.step()
    assert torch.equal(still, torch.ones(3))
    assert set(optimizer.momenta) == {1}
    torch.testing.assert_close(moved.detach(), torch.full((3,), 0.5))
    optimizer.zero_grad()
    assert moved.grad is None
