"""Networks and updates of FRAug's tests."""

from typing import Any

from tests.helpers import CLASSES, bars

from fedfill.algorithms.fraug import FRAug, Private, Shared, _LocalUpdate
from fedfill.data.samples import normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, State
from fedfill.streams import torch_stream
from fedfill.synthesis.embeddings import initial

WIDE = {"width": "wide"}  # with batch norm; embeddings of size 16


QUICK = {"batch_size": 8, "local_steps": 2, "learning_rate": 0.05}


INPUTS, LABELS = normalise(bars(8, [0, 1], 0).inputs), bars(8, [0, 1], 0).labels


def update_of(
    *, synthetic: float = 0.5, residual: float = 1.0, kept: Private | None = None, **settings: Any
) -> _LocalUpdate:
    """The local update of a client that exists in a test alone, at its first iteration."""
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=0)
    given = {"batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1, **settings}
    algorithm = FRAug(**given).resolved(rounds=300, model=model, inputs=INPUTS[:1])
    client = Client(
        id=0, round=0, data=bars(8, [0, 1], 0), classes=CLASSES, state=State({"own": None, "private": kept}),
        initial=weights_of(model), seed=0, resident=lambda weights: model,
    )  # fmt: skip
    generator = initial(algorithm.makers(model, CLASSES)[0], torch_stream(0, "generator"))
    message = Shared({}, generator, residual, synthetic)
    return _LocalUpdate(algorithm, client, model, algorithm.networks(client, model, generator), message)
