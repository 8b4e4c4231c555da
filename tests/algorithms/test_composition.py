"""Local objectives and aggregations as values: whom they compose with, and that composing adds nothing of its own."""

import pytest
import torch
from tests.helpers import run_rounds

from fedfill.algorithms import find, known_algorithms
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedprox import FedProx
from fedfill.algorithms.fedvae import FedVAE
from fedfill.errors import FedfillError, checked
from fedfill.settings import Experiment

DPMS = {"alpha": 5, "max_candidates": 50, "preliminary_rounds": 2, "local_epochs": 1, "batch_size": 8}
SGD = {"optimizer": "sgd", "learning_rate": 0.05}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("local", ["fedprox:mu=0.5", "moon:contrast=latent,mu=2", "moon:contrast=logits", "moon"])
def test_feddpms_with_a_local_objective_runs_both_phases_and_differs(local: str):
    plain = run_rounds(FedDPMS(**DPMS), rounds=4, participation=0.5)
    composed = run_rounds(FedDPMS(**DPMS, local=local), rounds=4, participation=0.5)
    assert composed.lost == []
    assert any("acceptance" in record for record in composed.history)
    assert not same(composed.state.weights, plain.state.weights)


def test_feddpms_with_scaffold_keeps_control_variates_on_both_sides():
    server = run_rounds(FedDPMS(**{**DPMS, **SGD}, local="scaffold"), rounds=4)
    assert server.state.control is not None
    assert set(server.state.control) == {n for n in server.state.weights if "running" not in n}
    assert all(state["control"] is not None for state in server.client_states.values())
    assert all("local_decoder" in state for state in server.client_states.values())


@pytest.mark.parametrize(("aggregation", "equal"), [("fednova", True), ("qffl:q=0.5", False)])
def test_feddpms_with_an_aggregation(aggregation: str, equal: bool):
    """FedNova is FedAvg's mean where all clients make as many steps, as they do here."""
    settings = {**DPMS, **SGD}
    plain = run_rounds(FedDPMS(**settings), rounds=4, participation=0.5)
    composed = run_rounds(FedDPMS(**settings, aggregation=aggregation), rounds=4, participation=0.5)
    assert composed.lost == []
    assert same(composed.state.weights, plain.state.weights) is equal


def test_a_value_of_no_effect_has_none():
    """mu = 0 leaves every bit; q = 0 is the plain mean, which FedDPMS's is where all hold as many samples."""
    settings = {**DPMS, **SGD}
    plain = run_rounds(FedDPMS(**settings), rounds=3)
    assert same(run_rounds(FedDPMS(**settings, local="fedprox:mu=0"), rounds=3).state.weights, plain.state.weights)
    once = run_rounds(FedDPMS(**settings), rounds=2)
    mean = run_rounds(FedDPMS(**settings, aggregation="qffl:q=0"), rounds=2)
    assert all(torch.allclose(mean.state.weights[n], once.state.weights[n], atol=1e-4) for n in once.state.weights)


def test_fedavg_with_a_value_is_that_algorithm():
    settings = {"local_epochs": 1, "batch_size": 8}
    assert same(
        run_rounds(FedAvg(**settings, local="fedprox:mu=0.3"), rounds=2).state.weights,
        run_rounds(FedProx(**settings, mu=0.3), rounds=2).state.weights,
    )
    assert same(
        run_rounds(FedAvg(**settings, **SGD, aggregation="qffl:q=2"), rounds=2).state.weights,
        run_rounds(find("qffl")(**settings, **SGD, q=2), rounds=2).state.weights,
    )


@pytest.mark.parametrize("kind", [FedMix, FedVAE])
def test_others_compose_too(kind: type):
    settings = {"local_epochs": 1, "batch_size": 8, **SGD}
    plain = run_rounds(kind(**settings), rounds=2)
    both = run_rounds(kind(**settings, local="fedprox:mu=1", aggregation="fednova"), rounds=2)
    assert both.lost == []
    assert not same(both.state.weights, plain.state.weights)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"local": "fedprx"}, "local: found 'fedprx'; did you mean 'fedprox'?"),
        ({"local": "feddyn"}, "local: found 'feddyn'; allowed: fedprox, moon, none, scaffold"),
        ({"local": "fednova"}, "local: found 'fednova'"),
        ({"local": "local"}, "local: found 'local'"),
        ({"aggregation": "fedprox"}, "aggregation: found 'fedprox'; allowed: fednova, none, qffl"),
        ({"local": "fedprox:mv=1"}, "local: fedprox takes no 'mv' here; allowed: mu"),
        ({"local": "fedprox:local_epochs=3"}, "local: fedprox takes no 'local_epochs' here"),
        ({"aggregation": "fednova:q=3"}, "aggregation: fednova takes no 'q' here; it has no settings"),
        ({"local": "fedprox:mu=-1"}, "mu: found '-1'; allowed: at least 0"),
        ({"local": "fedprox:mu"}, "algorithm: found 'mu' in 'fedprox:mu'"),
    ],
)
def test_slips(settings, sentence):
    with pytest.raises(FedfillError) as refusal:
        checked(FedDPMS, settings)
    assert sentence in str(refusal.value)


def test_scaffold_in_feddpms_needs_plain_gradient_steps():
    with pytest.raises(FedfillError, match="optimizer: found optimizer=adam with scaffold"):
        run_rounds(FedDPMS(**DPMS, local="scaffold"), rounds=1)


@pytest.mark.parametrize("name", ["fednova", "qffl"])
def test_scaffold_goes_with_the_plain_mean_alone(name: str):
    with pytest.raises(FedfillError, match=f"aggregation: found {name} with scaffold"):
        run_rounds(find(name)(**SGD, local="scaffold"), rounds=1)


def test_weights_that_nobody_would_use_are_refused():
    with pytest.raises(FedfillError, match="weighting: found uniform with aggregation=fednova"):
        run_rounds(FedAvg(weighting="uniform", aggregation="fednova"), rounds=1)
    for name in ("qffl", "feddyn"):
        with pytest.raises(FedfillError, match="weighting: found 'samples'; allowed: 'uniform'"):
            checked(find(name), {"weighting": "samples"})


def test_values_survive_the_settings_file():
    given = FedDPMS(local="moon:contrast=logits,mu=3", aggregation="qffl:q=0.25")
    document = given.model_dump()
    assert document["local"] == "moon:mu=3.0,temperature=0.5,contrast=logits"
    assert document["aggregation"] == "qffl:q=0.25"
    again = checked(FedDPMS, document)
    assert again == given
    assert checked(FedDPMS, {"local": "none", "aggregation": None}).local is None
    assert Experiment(algorithm="feddpms", settings=document).settings == document


@pytest.mark.parametrize(
    "name", [n for n in known_algorithms() if known_algorithms()[n].__module__.startswith("fedfill.")]
)
@pytest.mark.parametrize("buffers", ["average", "frozen"])
def test_running_statistics_follow_the_policy(name: str, buffers: str):
    """With batch norm: averaged they move, frozen they stay as the initial model has them; no counter is a mean."""
    extra = {**DPMS, "preliminary_rounds": 1} if name == "feddpms" else {"local_epochs": 1, "batch_size": 8}
    server = run_rounds(find(name)(**extra, buffers=buffers), rounds=2, model={"width": "wide"})
    models = (
        [state["weights"] for state in server.client_states.values()] if name == "local" else [server.state.weights]
    )
    for weights in models:
        moved = [n for n in weights if "running" in n and not torch.equal(weights[n], server.initial[n])]
        counters = [int(weights[n]) for n in weights if n.endswith("num_batches_tracked")]
        assert counters
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        if buffers == "average":
            assert len(moved) >= 6
            assert min(counters) > 0
            assert all((weights[n] > 0).all() for n in weights if n.endswith("running_var"))
        else:
            assert not moved
            assert set(counters) == {0}
