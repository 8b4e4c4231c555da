"""FedBN: normalisation layers stay at home, wherever they stand, and all else is FedAvg."""

from dataclasses import replace

import pytest
import torch
from tests.helpers import CLASSES, Run, bars, refused, run_rounds, small_federation

import fedfill
from fedfill.algorithms.fedbn import FedBN, without_normalisation
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import normalisation, weights_of
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, fit

WIDE = {"width": "wide"}  # with batch norm
QUICK = {"batch_size": 8, "local_epochs": 1, "optimizer": "sgd", "learning_rate": 0.05, "lr_decay": 1.0}


def is_norm(name: str) -> bool:
    """Whether a tensor of the wide network of 8x8 images belongs to batch norm: trunk 2, 5 and 9."""
    return name.startswith(("encoder.trunk.2.", "encoder.trunk.5.", "encoder.trunk.9."))


def test_batch_norm_never_travels_by_the_bytes():
    server = run_rounds(FedBN(**QUICK), rounds=2, model=WIDE)
    convolutions = (9 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 64 + 64)
    shared = convolutions + 3 + (256 * 16 + 16) + (16 * 4 + 4)  # a PReLU has one parameter; 64 channels of 2x2 go on
    local = 4 * (32 + 32 + 64)
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=0)
    assert sum(t.numel() for t in weights_of(model).values()) == shared + local + 3
    assert server.costs.legs == {"train": [2 * 4 * 4 * shared, 2 * 4 * (4 * shared + 8)]}
    own = [server.client_states[i]["own"] for i in range(4)]
    assert all(len(mine) == 15 for mine in own)
    assert all(is_norm(name) for name in own[0])
    assert not torch.equal(own[0]["encoder.trunk.2.running_mean"], own[1]["encoder.trunk.2.running_mean"])
    assert not torch.equal(own[0]["encoder.trunk.2.weight"], own[1]["encoder.trunk.2.weight"])


def test_the_servers_own_normalisation_layers_stay_as_they_began():
    server = run_rounds(FedBN(**QUICK), rounds=2, model=WIDE)
    for name, tensor in server.state.weights.items():
        assert torch.equal(tensor, server.initial[name]) is is_norm(name)


def test_batch_norm_of_downsample_branches_is_found_by_type():
    model = build("resnet18", (3, 8, 8), 10, ModelSettings(), seed=0)
    shared = without_normalisation(model, weights_of(model))
    # 17 3x3 and 3 1x1 convolutions without bias, and the head
    assert len(shared) == 20 + 2
    assert len(normalisation(model)) == 5 * 20
    branches = [name for name in weights_of(model) if ".shortcut." in name]
    assert [name for name in branches if name in shared] == [f"encoder.{k}.shortcut.0.weight" for k in (5, 7, 9)]


def test_a_client_alone_is_fedavgs_to_the_bit(tmp_path):
    options = {
        "data": "digits", "partition": "iid", "clients": 1, "rounds": 3, "data_fraction": 0.1, "model": "cnn2bn", "local_epochs": 1,
        "optimizer": "sgd", "learning_rate": 0.05, "lr_decay": 1.0, "batch_size": 16,
    }  # fmt: skip
    own, plain = (fedfill.run(name, **options, out=tmp_path / name) for name in ("fedbn", "fedavg"))
    assert own.weights.keys() == {f"0.{name}" for name in plain.weights}
    assert all(torch.equal(own.weights[f"0.{name}"], tensor) for name, tensor in plain.weights.items())
    assert own.summary["bytes_up"] < plain.summary["bytes_up"]


def test_shared_tensors_are_the_mean_over_clients_and_own_layers_go_on():
    """A second round begins with the mean of what is shared and with one's own layers: it is done again here by hand."""
    algorithm = FedBN(**QUICK, local_steps=2)
    first, second = (run_rounds(algorithm, rounds=n, model=WIDE) for n in (1, 2))
    run = Run(algorithm, WIDE, 1, 1.0, 2)
    trained = []
    for i in range(4):
        begin = algorithm.personal_weights(first.client_states[i], first.state.weights)
        assert all(torch.equal(begin[n], first.client_states[i]["own"][n]) for n in begin if is_norm(n))
        assert all(torch.equal(begin[n], first.state.weights[n]) for n in begin if not is_norm(n))
        request = Fit(begin, algorithm.loss, run.engine._data[i], algorithm.training(1))
        streams = (torch_stream(0, name, 1, i, 0) for name in ("fit", "draws"))
        trained.append(fit(run.server._resident, request, *streams).weights)
    run.engine.close()
    for name, tensor in second.state.weights.items():
        if not is_norm(name):
            assert torch.allclose(tensor, torch.stack([mine[name] for mine in trained]).mean(0), atol=1e-6)
    for i in range(4):
        assert all(torch.equal(tensor, trained[i][n]) for n, tensor in second.client_states[i]["own"].items())


def test_who_never_took_part_has_the_initial_layers():
    server = run_rounds(FedBN(**QUICK), rounds=1, model=WIDE, participation=0.5)
    assert len(server.client_states) == 2
    newcomer = FedBN().personal_weights({}, server.state.weights)
    assert all(torch.equal(newcomer[n], tensor) for n, tensor in server.initial.items() if is_norm(n))


def test_by_domain_everyones_model_is_judged_at_home_alone():
    whole = small_federation()
    away = replace(whole, test=bars(80, [2], seed=1000))  # class 2 alone; all four are in the clients' own splits
    at_home = replace(away, domains=("sea", "air", "land", "moon"))
    plain, by_domain = (
        run_rounds(FedBN(**QUICK), rounds=1, model=WIDE, federation=f).evaluation for f in (away, at_home)
    )
    assert [share is None for share in plain.accuracy_by_class] == [True, True, False, True]
    assert None not in by_domain.accuracy_by_class
    assert by_domain.accuracy == pytest.approx(sum(by_domain.accuracy_by_client) / 4)  # eight samples each
    assert by_domain.accuracy_by_client == plain.accuracy_by_client


@pytest.mark.parametrize("workers", [1, 2])
def test_composition(workers: int):
    plain = run_rounds(FedBN(**QUICK), rounds=2, model=WIDE)
    for method in (
        {"local": "fedprox:mu=0"},
        {"aggregation": "fednova"},
        {"aggregation": "dpfedavg:clip=1e3,noise_multiplier=1e-10"},
    ):
        server = run_rounds(FedBN(**QUICK, **method), rounds=2, model=WIDE, workers=workers)
        assert all(torch.allclose(server.state.weights[n], t, atol=1e-5) for n, t in plain.state.weights.items())
        assert server.lost == []


@pytest.mark.parametrize(("axis", "name"), [("local", "moon"), ("local", "scaffold"), ("aggregation", "qffl")])
def test_what_needs_whole_models_is_refused(axis: str, name: str):
    with refused(axis, f"{name} with fedbn"):
        fedfill.run("fedbn", model="cnn2bn", clients=3, rounds=1, **{axis: name, "projection": 4})


def test_models_without_normalisation_layers_are_refused():
    with refused("model"):
        fedfill.run("fedbn", model="cnn2", clients=3, rounds=1)


def test_silobn_keeps_running_statistics_alone():
    algorithm = FedBN(**QUICK, norm_shared="affine")
    plain, server = (run_rounds(a, rounds=2, model=WIDE) for a in (FedBN(**QUICK), algorithm))
    affine = 2 * 4 * (32 + 32 + 64)  # bytes of scales and shifts
    (down, up), (less_down, less_up) = server.costs.legs["train"], plain.costs.legs["train"]
    assert (down - less_down, up - less_up) == (2 * 4 * affine, 2 * 4 * affine)
    for i in range(4):
        own = server.client_states[i]["own"]
        assert {name.rpartition(".")[2] for name in own} == {"running_mean", "running_var", "num_batches_tracked"}
        assert len(own) == 9
    moved = [name for name, w in server.state.weights.items() if not torch.equal(w, server.initial[name])]
    assert {name for name in server.initial if "running" not in name and "tracked" not in name} == set(moved)
    assert "norm_shared" not in FedBN().model_dump()
    assert algorithm.model_dump()["norm_shared"] == "affine"
