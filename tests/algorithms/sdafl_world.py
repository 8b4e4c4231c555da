"""A small world of SDA-FL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tests.helpers import CLASSES, TINY_GAN, bars, prepare, scripted, small_federation
from torch import nn

from fedfill.algorithms.sdafl import SDAFL, Aided, AidedUpdate, Images, Pretrained
from fedfill.data.federation import Federation
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.protocol.client import State

N = 3  # images of a client, on scripted clients


QUICK: dict[str, Any] = {
    **TINY_GAN, "images_per_client": 6, "local_steps": 5, "batch_size": 8, "server_steps": 2, "optimizer": "sgd",
    "learning_rate": 0.05, "lr_decay": 1.0,
}  # fmt: skip


def net() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def sure_of(label: int | None) -> dict[str, torch.Tensor]:
    """Weights that give every image this class with probability .9999; None: all classes the same."""
    weights = {name: tensor.clone() for name, tensor in weights_of(net()).items()}
    if label is not None:
        weights["1.bias"][label] = 10.0
    return weights


class World:
    def __init__(
        self, clients: int = 3, kind: type[SDAFL] = SDAFL, participation: float = 1.0, **settings: Any
    ) -> None:
        self.algorithm = kind(
            **{"gan_iterations": 5, "gan_chunk": 2, "images_per_client": N, "server_steps": 0, **settings}
        )
        self.server, self.engine = scripted(clients, weights_of(net()), participation)
        self.server._resident = make_resident(net(), torch.device("cpu"))
        self.server.state = State(self.algorithm.server_state(weights_of(net())))
        self.sure: Callable[[int, int], int | None] = lambda i, t: i
        conditional = self.algorithm.conditional
        self.engine.script = {
            "pretrain_gan": lambda i, message, t: Pretrained(message.iterations),
            "upload": lambda i, message, t: Images(
                bars(N, [i], i).inputs, torch.full((N,), i) if conditional else None
            ),
            "train_aided": lambda i, message, t: AidedUpdate(sure_of(self.sure(i, t)), 10, None),
        }

    def prepare(self) -> World:
        prepare(self.algorithm, self.server)
        return self

    def round(self, t: int) -> dict[int, Aided]:
        """The messages of one round."""
        self.server.begin(t)
        self.algorithm.round(self.server, t)
        return {i: m for when, name, i, m in self.engine.sent if when == t and name == "train_aided"}

    @property
    def labels(self) -> list[list[int]]:
        return self.server.state.pool.labels.view(-1, N).tolist()


def partly_labelled() -> Federation:
    """Each client has labels for 8 of its 40 samples."""
    whole = small_federation()
    clients = tuple(
        dataclasses.replace(c, train=c.train[:8], unlabelled=c.train[8:].unlabelled()) for c in whole.clients
    )
    return dataclasses.replace(whole, clients=clients)


TINY = {
    **TINY_GAN, "clients": 4, "rounds": 2, "data_fraction": 0.2, "participation": 0.6, "images_per_client": 6,
    "local_steps": 3, "server_steps": 2, "tau": 0.2,
}  # fmt: skip
