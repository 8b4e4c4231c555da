"""MixStyle: means and deviations of channels are mixed between samples, inside the network and in training alone."""

import pytest
import torch
from tests.helpers import refused, run_rounds, start_of

from fedfill import tree
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.mixstyle import MixStyle, stages, with_mixed_styles
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.training.fit import Context
from fedfill.training.mixup import draw_lambdas

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


def test_a_mixture_by_hand():
    """Two samples of one channel: values 1 and 3 (mean 2, deviation 1), and 10 and 30 (mean 20, deviation 10)."""
    x = torch.tensor([[[[1.0, 3.0]]], [[[10.0, 30.0]]]])
    order = torch.tensor([1, 0])
    found = with_mixed_styles(x, torch.tensor([0.5, 0.25]), order, eps=0)
    # first: mean 11, deviation 5.5; second: mean .25 * 20 + .75 * 2 = 6.5, deviation .25 * 10 + .75 * 1 = 3.25
    torch.testing.assert_close(found, torch.tensor([[[[5.5, 16.5]]], [[[3.25, 9.75]]]]))
    torch.testing.assert_close(with_mixed_styles(x, torch.ones(2), order), x)
    swapped = with_mixed_styles(x, torch.zeros(2), order, eps=0)
    torch.testing.assert_close(swapped, x.flip(0))  # these two differ in nothing but their style


def test_styles_are_constants_for_the_gradient():
    x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    order, shares = torch.tensor([2, 0, 1]), torch.tensor([0.3, 0.9, 0.5])
    with_mixed_styles(x, shares, order).sum().backward()
    deviation = x.detach().var((2, 3), correction=0).add(1e-6).sqrt()
    own = shares[:, None]
    expected = (own * deviation + (1 - own) * deviation[order]) / deviation
    torch.testing.assert_close(x.grad, expected[:, :, None, None].expand_as(x))


def test_a_map_of_one_value_and_one_sample_stay_numbers():
    for shape in ((3, 2, 1, 1), (1, 2, 4, 4)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        found = with_mixed_styles(x, torch.full((len(x),), 0.5), torch.arange(len(x)).flip(0))
        found.sum().backward()
        assert found.isfinite().all()
        assert x.grad.isfinite().all()


def test_shares_are_drawn_from_beta():
    shares = draw_lambdas(0.1, 4000, torch.Generator().manual_seed(0))
    assert shares.dtype == torch.float32
    assert float(shares.min()) >= 0
    assert float(shares.max()) <= 1
    assert float(shares.double().mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.double().var()) == pytest.approx(1 / (4 * 1.2), abs=0.01)  # alpha / (4 alpha (2 alpha + 1))


@pytest.mark.parametrize("name", ["cnn2", "cnn4", "cnn2bn", "cnn2fc", "digits6", "resnet18"])
def test_built_in_networks_have_stages(name: str):
    shape = (3, 8, 8) if name == "cnn4" else (1, 8, 8)
    net = build(name, shape, 4, ModelSettings(), seed=0)
    assert len(stages(net, 2)) == 2
    assert stages(net, 1)[0] is stages(net, 2)[0]


def test_it_mixes_in_training_and_nowhere_else():
    net = build("cnn2", (1, 8, 8), 4, ModelSettings(), seed=0)
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = []

    def loss(model, _batch, _context):
        seen.append(model(x))
        return seen[-1].sum()

    weights = weights_of(net)
    for training, probability, changed in ((True, 1.0, True), (True, 0.0, False), (False, 1.0, False)):
        net.train(training)
        objective = MixStyle(mix_probability=probability).objective(start_of(weights, model=net), loss)
        net.train(training)
        objective(net, None, Context(weights, torch.Generator().manual_seed(1), 0))
        assert torch.equal(seen[-1], net(x)) is not changed
    assert not any(layer._forward_hooks for layer in net.modules())


def test_without_mixing_it_is_fedavg_to_the_bit():
    plain, own, mixed = (
        run_rounds(a, rounds=2, model={"width": "wide"})
        for a in (FedAvg(**QUICK), MixStyle(**QUICK, mix_probability=0), MixStyle(**QUICK))
    )
    assert tree.sha256(own.state.weights) == tree.sha256(plain.state.weights) != tree.sha256(mixed.state.weights)
    assert mixed.costs.legs == plain.costs.legs


def test_as_a_value_it_is_the_same():
    own, taken = (run_rounds(a, rounds=2) for a in (MixStyle(**QUICK), FedAvg(**QUICK, local="mixstyle")))
    assert tree.sha256(own.state.weights) == tree.sha256(taken.state.weights)


def test_slips():
    net = build("mlp", (1, 8, 8), 4, ModelSettings(), seed=0)
    x = torch.zeros(1, 1, 8, 8)
    with refused("model", "mixstyle"):
        MixStyle().resolved(rounds=1, model=net, inputs=x)
