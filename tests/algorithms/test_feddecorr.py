"""FedDecorr: the term by hand on both scales, and what it does to representations."""

import pytest
import torch
from tests.helpers import run_rounds, small_federation, start_of

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddecorr import FedDecorr, correlations
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedvae import FedVAE
from fedfill.algorithms.fixmatch import FixMatch
from fedfill.data.samples import Batch
from fedfill.models.networks import ModelSettings, build
from fedfill.training.fit import Context
from fedfill.training.losses import cross_entropy

SMALL = {"local_epochs": 2, "batch_size": 8}
Z = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 4.0]])
"""Two dimensions with a correlation of the root of 1/2."""


def test_the_term_by_hand():
    # (1 + 1 + 1/2 + 1/2) / 2^2; and ((4 - 1) root(1/2))^2 / 4
    assert correlations(Z, "paper").item() == pytest.approx(0.75, abs=1e-5)
    assert correlations(Z, "code").item() == pytest.approx(1.125, abs=1e-5)


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_shift_and_size_of_a_dimension_are_no_matter(scale: str):
    other = correlations(Z * torch.tensor([10.0, 0.1]) + torch.tensor([-3.0, 7.0]), scale).item()
    assert other == pytest.approx(correlations(Z, scale).item(), rel=1e-4)


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_one_sample_and_dimensions_that_never_change_have_a_gradient(scale: str):
    for z in (Z[:1], torch.cat([Z, torch.zeros(4, 1)], dim=1)):
        leaf = z.clone().requires_grad_()
        correlations(leaf, scale).backward()
        assert leaf.grad.isfinite().all()
    assert correlations(Z[:1], scale).item() == 0


def test_one_dimension_has_no_other():
    assert correlations(Z[:, :1], "code").item() == 0


def test_the_authors_scale_is_about_a_batch_times_the_papers_off_its_diagonal():
    z = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    off = correlations(z, "paper").item() - 1 / 10  # the diagonal's part
    code = correlations(z, "code").item()
    assert code == pytest.approx(off * 10 / 9 * 63**2 / 64, rel=1e-3)


def test_the_term_is_of_what_the_classifier_receives():
    model = build("cnn2", (1, 8, 8), 4, ModelSettings(), seed=0).train()
    data = small_federation().clients[0].train
    batch = Batch(data.inputs[:8].float() / 127.5 - 1, data.labels[:8], torch.arange(8))
    objective = FedDecorr(beta=2.0).objective(start_of({}), lambda m, b, context: cross_entropy(m, b))
    expected = cross_entropy(model, batch) + 2 * correlations(model.encoder(batch.inputs), "code")
    assert objective(model, batch, Context({}, torch.Generator(), 0)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_without_beta_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SMALL), rounds=2).state.weights
    none = run_rounds(FedDecorr(**SMALL, beta=0.0), rounds=2).state.weights
    assert all(torch.equal(none[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", [FedVAE, FedMix, FixMatch])
def test_others_take_it(kind: type):
    settings = {**SMALL, **({"group_size": 8} if kind is FedMix else {})}
    labelled = 8 if kind is FixMatch else None
    plain = run_rounds(kind(**settings), rounds=2, labelled=labelled)
    taken = run_rounds(kind(**settings, local="feddecorr"), rounds=2, labelled=labelled)
    assert taken.lost == []
    assert any(not torch.equal(taken.state.weights[n], tensor) for n, tensor in plain.state.weights.items())
