"""A small world of FedDPMS."""

import torch
from tests.helpers import CLASSES, bars

from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part, rest, weights_of
from fedfill.protocol.client import Client, State

QUICK = {
    "local_epochs": 4,
    "batch_size": 8,
    "learning_rate": 0.01,
    "lr_decay": 1.0,
    "n_classes": 2,
    "alpha": 5,
    "sigma": 1.0,
}


CPU = torch.device("cpu")


def network(seed):
    return build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=("decoder",), seed=seed)


def without_decoder(seed):
    return rest(weights_of(network(seed)), "decoder")


def samples_of(counts):
    """So many samples of each class."""
    return bars(sum(counts), [c for c, count in enumerate(counts) for _ in range(count)], seed=0)


def client_with(counts):
    """A client that holds w_d, with so many samples of each class."""
    initial = weights_of(network(0))
    return Client(
        id=0, round=0, data=samples_of(counts), classes=CLASSES, state=State({"decoder": part(initial, "decoder")}),
        initial=initial, seed=0, resident=make_resident(network(0), CPU).load,
    )  # fmt: skip


def share(algorithm, counts, received=1, local=2):
    """What such a client shares, given the seeds of the received and of its own network; and the client."""
    client = client_with(counts)
    shared, _ = algorithm.dpms(client, without_decoder(received), without_decoder(local))
    return shared, client
