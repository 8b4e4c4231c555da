"""Each client alone: nothing crosses, and everybody is evaluated with its own model."""

import pytest
import torch
from tests.helpers import refused, run_rounds, small_federation

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.local import Local

SETTINGS = {"local_epochs": 3, "batch_size": 8, "learning_rate": 0.01}


def test_nothing_crosses_and_every_client_knows_its_own_classes():
    server = run_rounds(Local(**SETTINGS), rounds=4, model={"latent_activation": "relu"})
    assert (server.costs.bytes_up, server.costs.bytes_down) == (0, 0)
    assert server.ledger.account(1e-5)["entries"] == []
    assert min(server.evaluation.accuracy_by_client) > 0.9
    # each knows two of four classes, and the accuracy is the mean over everybody's own model
    assert 0.4 < server.evaluation.accuracy < 0.6
    assert all(0.3 < value < 0.7 for value in server.evaluation.accuracy_by_class)


def test_the_first_round_is_what_fedavgs_client_does():
    server = run_rounds(Local(**SETTINGS), rounds=1)
    plain = run_rounds(FedAvg(**SETTINGS), rounds=1)
    federation = small_federation()
    sizes = [len(client.train) for client in federation.clients]
    for name, mean in plain.state.weights.items():
        if mean.is_floating_point():
            own = torch.stack([server.client_states[i]["weights"][name] for i in range(4)])
            weights = torch.tensor(sizes).reshape(-1, *[1] * mean.dim()) / sum(sizes)
            assert torch.allclose((own * weights).sum(0), mean, atol=1e-6)


def test_clients_outside_the_cohort_keep_their_model():
    states = []
    run_rounds(
        Local(**SETTINGS), rounds=2, participation=0.5, after=lambda server, t: states.append(server._engine.states())
    )
    assert len(states[0]) == 2
    assert all(i in states[1] for i in states[0])


def test_a_run_resumes_and_its_hash_is_of_everybodys_model(tmp_path):
    options = {"data": "digits", "clients": 3, "rounds": 2, "local_epochs": 1, "data_fraction": 0.2}
    result = fedfill.run("local", **options, out=tmp_path / "a")
    assert {name.split(".")[0] for name in result.weights} == {"0", "1", "2"}
    assert fedfill.resume(tmp_path / "a").summary == result.summary
    assert (
        fedfill.run("local", **options, workers=1, out=tmp_path / "b").summary["weights_sha256"]
        == result.summary["weights_sha256"]
    )


@pytest.mark.parametrize(("share", "clients"), [(0, 3), (0.1, 400)])
def test_hosts_need_a_test_split_of_their_own(share, clients, tmp_path):
    with refused("client_test", f"found {share:g},"):
        fedfill.run("local", engine="flower", clients=clients, partition="iid", client_test=share, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
