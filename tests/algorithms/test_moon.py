"""MOON: the contrast by hand, slow against fast, and what a client remembers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.helpers import bars, refused, run_rounds, start_of
from torch.nn import functional

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.moon import Moon, model_contrast
from fedfill.data.samples import Batch, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.training.fit import Context
from fedfill.training.losses import cross_entropy


def net(seed: int, width: str = "paper"):
    settings = ModelSettings(width=width, dropout=0.5 if width == "wide" else None)
    return build("cnn2", (1, 8, 8), 4, settings, needs=("projection",), seed=seed)


def plain(model, batch, context):
    return cross_entropy(model, batch)


def test_contrast_by_hand():
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    received = torch.tensor([[3.0, 0.0], [1.0, 0.0]])  # cosines 1 and 0
    previous = torch.tensor([[0.0, 1.0], [0.0, 1.0]])  # cosines 0 and 1
    e = math.exp(1 / 0.5)
    expected = (-math.log(e / (e + 1)) - math.log(1 / (1 + e))) / 2
    assert model_contrast(z, received, previous, 0.5).item() == pytest.approx(expected, rel=1e-6)


def test_a_first_training_has_no_contrast():
    start = start_of(weights_of(net(0)), model=net(0), previous=None)
    assert Moon().objective(start, plain) is plain


@pytest.mark.parametrize("contrast", ["projection", "latent", "logits"])
@pytest.mark.parametrize("width", ["paper", "wide"])
def test_slow_against_fast(contrast: str, width: str):
    """The objective is the one that runs all three networks on each mini-batch, the fixed ones in evaluation mode."""
    data = bars(30, [0, 1, 2], 0)
    received, previous = weights_of(net(1, width)), weights_of(net(2, width))
    start = start_of(received, model=net(0, width), data=data, previous=previous)
    algorithm = Moon(mu=2.0, temperature=0.3, contrast=contrast)
    objective = algorithm.objective(start, plain)
    index = torch.tensor([3, 29, 0, 11])
    batch = Batch(normalise(data.inputs[index]), data.labels[index], index)
    model = net(3, width).train()
    if width == "wide":
        model.encoder.trunk.apply(lambda layer: setattr(layer, "p", 0.0) if hasattr(layer, "p") else None)
    context = Context(received, torch.Generator(), 0)

    def z(model):
        codes = model.encoder(batch.inputs)
        return {"latent": codes, "projection": model.projection(codes), "logits": model(batch.inputs)}[contrast]

    with torch.no_grad():
        fixed = [z(net(seed, width).eval()) for seed in (1, 2)]
    own = z(model)
    sims = [functional.cosine_similarity(own, other) / 0.3 for other in fixed]
    term = -torch.log(sims[0].exp() / (sims[0].exp() + sims[1].exp())).mean()
    slow = cross_entropy(model, batch) + 2.0 * term
    fast = objective(model, batch, context)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-4)
    grads = [torch.autograd.grad(value, list(model.parameters())) for value in (slow, fast)]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*grads, strict=True))


def test_a_loss_that_sees_other_samples_too_is_contrasted_on_those_of_the_mini_batch():
    data = bars(12, [0, 1, 2], 0)
    start = start_of(weights_of(net(1)), model=net(0), data=data, previous=weights_of(net(2)))
    batch = Batch(normalise(data.inputs[:4]), data.labels[:4], torch.arange(4))
    context, model = Context(start.weights, torch.Generator(), 0), net(3)

    def more(model, batch, context):
        scores = model(torch.cat([normalise(data.inputs[4:]), batch.inputs]))
        return functional.cross_entropy(scores[8:], batch.labels)

    own, other = (Moon(mu=2.0).objective(start, loss)(model, batch, context) for loss in (plain, more))
    assert other.item() == pytest.approx(own.item(), rel=1e-5)


def test_the_head_stands_in_the_prediction_path():
    model = net(0)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), model.classifier(model.projection(model.encoder(x))))
    assert model.classifier.in_features == 256
    small = build("cnn2", (1, 8, 8), 4, ModelSettings(projection=8), seed=0)
    assert small.classifier.in_features == 8
    # the encoder starts as everybody's does
    assert torch.equal(model.encoder.mu.weight, build("cnn2", (1, 8, 8), 4, ModelSettings(), seed=0).encoder.mu.weight)


def test_where_a_loss_passes_mixtures_the_mini_batch_has_a_pass_of_its_own():
    """As many mixtures as samples could be taken for these; of the received model's own codes the cosine is 1."""
    data = bars(12, [0, 1, 2], 0)
    received = weights_of(net(1))
    batch = Batch(normalise(data.inputs), data.labels, torch.arange(12))

    def mixed(model, batch, context):
        return cross_entropy(model, replace(batch, inputs=batch.inputs.flip(0)))

    terms = []
    for beside in (True, False):
        start = replace(start_of(received, model=net(0), data=data, previous=weights_of(net(2))), draws_beside=beside)
        objective = Moon(mu=1.0, contrast="latent").objective(start, mixed)
        model = net(1)
        context = Context(received, torch.Generator(), 0)
        terms.append((objective(model, batch, context) - mixed(model, batch, context)).item())
    with torch.no_grad():
        z, last = net(1).encoder(batch.inputs), net(2).encoder(batch.inputs)
    assert terms[0] == pytest.approx(model_contrast(z, z, last, 0.5).item(), rel=1e-4)
    assert terms[1] != pytest.approx(terms[0], rel=1e-4)


def test_a_client_that_is_not_selected_keeps_its_stale_model():
    kept: list[dict[int, torch.Tensor]] = []

    def after(server, t):
        states = server._engine.states()
        kept.append({i: state["previous"]["classifier.weight"].clone() for i, state in states.items()})

    run_rounds(Moon(local_epochs=1, batch_size=8), rounds=3, participation=0.5, after=after)
    for before, now in itertools.pairwise(kept):
        changed = [i for i in before if not torch.equal(before[i], now[i])]
        assert len(changed) <= 2
        assert set(before) <= set(now)
    assert any(i in kept[0] and torch.equal(kept[0][i], kept[1][i]) for i in kept[0]) or len(kept[1]) > 2


def test_a_client_keeps_the_model_that_it_trained_and_not_the_one_it_received():
    server = run_rounds(Moon(local_epochs=1, batch_size=8), rounds=1)
    kept = [state["previous"] for state in server.client_states.values()]
    for name, weight in server.state.weights.items():
        mean = sum(previous[name] for previous in kept) / 4  # clients of one size
        assert torch.allclose(mean, weight, atol=1e-6)
    assert not torch.equal(kept[0]["classifier.weight"], kept[1]["classifier.weight"])


def test_the_first_round_is_fedavg_on_the_same_network_and_mu_0_always_is():
    settings = {"local_epochs": 2, "batch_size": 8}
    for rounds, mu, same in ((1, 5.0, True), (2, 5.0, False), (2, 0.0, True)):
        plain_run = run_rounds(FedAvg(**settings), rounds=rounds, model={"projection": 256}).state.weights
        moon = run_rounds(Moon(**settings, mu=mu), rounds=rounds).state.weights
        assert all(torch.allclose(moon[n], plain_run[n], atol=1e-6) for n in plain_run) is same


def test_a_network_without_the_head_is_refused():
    import fedfill

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))
            self.classifier = torch.nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.encoder(x))

    with refused("model", "encoder, projection, classifier", "Bare has no 'projection'"):
        fedfill.run("moon", model=Bare(), rounds=1, clients=4)
