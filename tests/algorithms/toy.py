"""One client of one number, whose handlers train for real: for rounds that are worked by hand."""

from typing import Any

import torch
from tests.helpers import CLASSES, bars
from torch import nn

from fedfill.algorithms import Broadcast
from fedfill.protocol.client import Client, State
from fedfill.training.fit import Fit, Fitted, Resident, fit


def trained(algorithm: Any, received: float, initial: float = 0.0, **state: Any) -> tuple[float, Client]:
    """What one local training sends that begins with the number `received`, and the client after it.

    The algorithm's loss is of the model's parameter ``weight``, whatever the samples are.
    """
    model = nn.Linear(1, 1, bias=False)
    resident = Resident(model, torch.device("cpu"), channels_last=False)

    def train(request: Fit) -> Fitted:
        return fit(resident, request, torch.Generator().manual_seed(0), torch.Generator().manual_seed(1))

    client = Client(
        id=0, round=0, data=bars(8, [0, 1], 0), classes=CLASSES, state=State({**algorithm.client_state(), **state}),
        initial=number(initial), seed=0, resident=resident.load, fit=train,
    )  # fmt: skip
    reply = algorithm.train(client, Broadcast(number(received)))
    return float(reply.weights["weight"]), client


def number(x: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([[x]])}
