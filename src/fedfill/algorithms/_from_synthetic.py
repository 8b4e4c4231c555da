"""The base of algorithms whose clients send once what images can be made of, and whose classifier sees these images alone."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fedfill.algorithms._base import Algorithm
from fedfill.data.samples import Samples
from fedfill.protocol.server import Server

SHOWN = 40
"""Images of each class that are kept to be looked at."""


class FromSynthetic(Algorithm):
    """Images are made at the server, and the classifier is trained there on nothing else: train on synthetic, test on real."""

    single_round = True

    images_per_class: int = Field(default=1000, ge=1)
    """Synthetic images of each class that the classifier is trained on."""
    classifier_epochs: int = Field(default=5, ge=1)
    """Passes of the classifier over these images, with batch_size, optimizer and learning_rate."""

    def synthesise(self, server: Server, per_class: int) -> Samples:
        """Images of what the server has received.

        Args:
            server: For its state, its model and its streams.
            per_class: How many of each class that somebody holds.

        Returns:
            Images and labels.
        """
        raise NotImplementedError

    def train_classifier(self, server: Server, t: int) -> None:
        """The classifier, trained at the server on synthetic images alone."""
        training = replace(self.training(t), epochs=self.classifier_epochs, steps=None)
        data = self.synthesise(server, self.images_per_class)
        server.state.weights = server.fit(server.state.weights, self.loss, training, data=data).weights

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """New images, so many of each class."""
        return self.synthesise(server, per_class or SHOWN)
