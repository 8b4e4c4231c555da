"""pFedAvg: the global model is FedAvg's, and everybody is evaluated with a fine-tuned copy that stays at home."""

import pytest
import torch
from tests.helpers import Run, refused, run_rounds

from fedfill import tree
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.pfedavg import PFedAvg
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, LocalTraining, fit

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


@pytest.mark.parametrize("own", [{}, {"personal_epochs": 3}])
def test_what_is_shared_is_fedavgs_to_the_bit_with_the_same_bytes(own: dict):
    plain, personal = (run_rounds(a, rounds=3) for a in (FedAvg(**QUICK), PFedAvg(**QUICK, **own)))
    assert all(torch.equal(personal.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert personal.costs.legs == plain.costs.legs
    # fine-tuning apart costs its own epochs
    assert personal.costs.train_samples == plain.costs.train_samples * (1 + own.get("personal_epochs", 0))


def copies(server) -> list[dict[str, torch.Tensor]]:
    return [PFedAvg().personal_weights(server.client_states[i], server.state.weights) for i in range(4)]


def test_without_epochs_of_its_own_a_copy_is_the_local_training():
    server = run_rounds(PFedAvg(**QUICK), rounds=1)
    for name, mean in server.state.weights.items():  # all clients have as many samples
        assert torch.allclose(torch.stack([copy[name] for copy in copies(server)]).mean(0), mean, atol=1e-6)
    assert not torch.equal(copies(server)[0]["classifier.weight"], copies(server)[1]["classifier.weight"])


@pytest.mark.parametrize("budget", [{}, {"local_steps": 2}])
def test_a_copy_is_fine_tuned_from_what_was_received_and_not_from_the_copy_before(budget: dict):
    algorithm = PFedAvg(**QUICK, **budget, personal_epochs=2)
    first, second = (run_rounds(algorithm, rounds=n) for n in (1, 2))
    run = Run(algorithm, {}, 1, 1.0, 2)
    for i in range(4):
        training = LocalTraining(epochs=2, batch_size=8, learning_rate=0.01)  # epochs, even where the rest counts steps
        streams = (torch_stream(0, name, 1, i, 1) for name in ("fit", "draws"))  # the second training of this round
        fitted = fit(
            run.server._resident, Fit(first.state.weights, algorithm.loss, run.engine._data[i], training), *streams
        )
        assert all(torch.equal(tensor, copies(second)[i][name]) for name, tensor in fitted.weights.items())
    run.engine.close()


def test_copies_never_leave_and_the_local_objective_is_for_what_is_shared():
    both = [run_rounds(PFedAvg(**QUICK, local=f"fedprox:mu={mu}", personal_epochs=1), rounds=1) for mu in (0, 50)]
    assert tree.sha256(both[0].state.weights) != tree.sha256(both[1].state.weights)
    for a, b in zip(*map(copies, both), strict=True):
        assert tree.sha256(a) == tree.sha256(b)


def test_clients_know_their_own_classes_better_than_the_global_model_does():
    settings = {**QUICK, "local_epochs": 3}
    plain, personal = (
        run_rounds(a, rounds=4, model={"latent_activation": "relu"}) for a in (FedAvg(**settings), PFedAvg(**settings))
    )
    assert min(personal.evaluation.accuracy_by_client) > 0.9
    assert personal.evaluation.accuracy < plain.evaluation.accuracy  # of all classes they know less


def test_slips():
    with pytest.raises(ValueError, match=r"\bpersonal_epochs\b"):
        PFedAvg(personal_epochs=0)
    with refused("aggregation", "fednova", "scaffold"):
        run_rounds(PFedAvg(optimizer="sgd", local="scaffold", aggregation="fednova"), rounds=1)
