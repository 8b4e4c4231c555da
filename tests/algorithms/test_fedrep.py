"""FedRep: the head first, with the body fixed, and then the body, with the head fixed."""

import torch
from tests.helpers import Run, run_rounds
from torch import nn

import fedfill
from fedfill.algorithms.fedper import FedPer
from fedfill.algorithms.fedrep import FedRep
from fedfill.models.views import part, rest
from fedfill.protocol.client import Client
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, LocalTraining, fit

QUICK = {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.01, "head_epochs": 2}
WIDE = {"width": "wide"}  # with batch norm


def test_bytes_are_fedpers():
    plain, server = (run_rounds(kind(batch_size=8, local_epochs=1), rounds=2) for kind in (FedPer, FedRep))
    assert server.costs.legs == plain.costs.legs
    assert server.costs.train_samples == plain.costs.train_samples * (10 + 1)


def test_a_second_round_is_the_head_on_the_received_body_and_then_the_body_under_this_head():
    """Done again with torch's own words: what is fixed has no gradient, and its batch norm is in evaluation mode."""
    algorithm = FedRep(**QUICK)
    first, second = (run_rounds(algorithm, rounds=n, model=WIDE) for n in (1, 2))
    run = Run(algorithm, WIDE, 1, 1.0, 2)
    bodies = []
    for i in range(4):
        body, head = rest(first.state.weights, "classifier"), first.client_states[i]["own"]
        data = run.engine._data[i]
        model = run.server._resident.model
        model.encoder.requires_grad_(False)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(lambda layer, inputs: layer.eval() and None)
        streams = [torch_stream(0, name, 1, i, 0) for name in ("fit", "draws")]
        training = LocalTraining(epochs=2, batch_size=8, learning_rate=0.01)
        trained = fit(run.server._resident, Fit({**body, **head}, algorithm.loss, data, training), *streams)
        new = part(trained.weights, "classifier")
        for name, tensor in second.client_states[i]["own"].items():
            assert torch.allclose(tensor, new[name], atol=1e-6)
            assert not torch.equal(tensor, head[name])
        model.requires_grad_(True)
        model.classifier.requires_grad_(False)
        for layer in model.modules():
            layer._forward_pre_hooks.clear()
        streams = [torch_stream(0, name, 1, i, 1) for name in ("fit", "draws")]
        trained = fit(run.server._resident, Fit({**body, **new}, algorithm.loss, data, algorithm.training(1)), *streams)
        model.requires_grad_(True)
        bodies.append(rest(trained.weights, "classifier"))
    run.engine.close()
    for name in bodies[0]:
        if bodies[0][name].is_floating_point():
            mean = torch.stack([mine[name] for mine in bodies]).mean(0)
            assert torch.allclose(second.state.weights[name], mean, atol=1e-5)


def test_what_is_fixed_stays_to_the_bit_with_its_statistics():
    seen = []

    class Looked(FedRep):
        def contribute(self, client: Client, message, loss, **words):
            before = {name: tensor.clone() for name, tensor in words["fixed"].items()}
            done = super().contribute(client, message, loss, **words)
            seen.append(all(torch.equal(words["fixed"][name], tensor) for name, tensor in before.items()))
            assert done.trained.keys() == message.weights.keys()
            return done

    server = run_rounds(Looked(**QUICK, weight_decay=0.1), rounds=2, model=WIDE)
    assert seen == [True] * 8
    assert all(torch.isfinite(tensor).all() for tensor in server.state.weights.values())
    # the head's epochs move no statistics of the body: a head alone leaves the counters where they were
    idle = run_rounds(FedRep(**{**QUICK, "learning_rate": 1e-30}), rounds=1, model=WIDE)
    counters = [int(tensor) for name, tensor in idle.state.weights.items() if name.endswith("num_batches_tracked")]
    assert set(counters) == {5}  # 40 samples in mini-batches of 8: those of the body's one epoch


def test_without_epochs_of_the_head_it_stays_the_initial_one():
    server = run_rounds(FedRep(**{**QUICK, "head_epochs": 0}), rounds=2)
    for state in server.client_states.values():
        assert all(torch.equal(tensor, server.initial[name]) for name, tensor in state["own"].items())


def test_two_workers_are_one(tmp_path):
    options = {
        "clients": 3,
        "rounds": 2,
        "data_fraction": 0.2,
        "local_epochs": 1,
        "participation": 0.7,
        "model": "cnn2bn",
    }
    one, two = (
        fedfill.run("fedrep", **options, workers=n, out=tmp_path / str(n)).summary["weights_sha256"] for n in (1, 2)
    )
    assert one == two
