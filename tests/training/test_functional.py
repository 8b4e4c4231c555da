"""A loss as a function of a model's tensors: the diagonal of the Fisher information by hand and sample by sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfill.data.samples import Samples
from fedfill.training.functional import fisher_information


def test_the_information_by_hand():
    """Scores are the biases, both 0: the gradient of a sample is (-1/2, 1/2) or (1/2, -1/2)."""
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    samples = Samples(torch.tensor([[2.0], [0.0]]), torch.tensor([0, 1]))
    found = fisher_information(model.eval(), dict(model.state_dict()), samples)
    assert torch.allclose(found["bias"], torch.tensor([0.25, 0.25]))
    assert torch.allclose(found["weight"], torch.tensor([[0.5], [0.5]]))  # (2/2)^2, and nothing from x = 0


def test_the_information_is_of_single_samples_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)).eval()
    samples = Samples(torch.randn(7, 3), torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in zip(samples.inputs, samples.labels, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(x[None]), y[None]).backward()
        for name, p in model.named_parameters():
            expected[name] += p.grad.square() / 7
    for most in (1, 1 << 24):
        monkeypatch.setattr("fedfill.training.functional.GRADIENTS_AT_ONCE", most)
        found = fisher_information(model, {name: p.detach() for name, p in model.named_parameters()}, samples)
        assert all(torch.allclose(found[name], f, atol=1e-6) for name, f in expected.items())


def test_the_information_of_a_shared_tensor_stands_under_both_names_and_without_samples_it_is_0():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    w = model.eval().state_dict()
    some = fisher_information(model, w, Samples(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert torch.equal(some["0.weight"], some["1.weight"])
    assert some["0.weight"].min() > 0
    none = fisher_information(model, w, Samples(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
    assert {name: float(f.abs().max()) for name, f in none.items()} == dict.fromkeys(w, 0.0)
