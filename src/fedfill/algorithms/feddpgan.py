"""FedDPGAN: Zhang et al., "FedDPGAN: Federated Differentially Private Generative Adversarial Networks", 2021.

FedGAN whose clients may train their GANs under noise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedfill.algorithms.fedgan import Common, FedGAN, Own
from fedfill.privacy.releases import public
from fedfill.protocol.client import Client, client_handler
from fedfill.synthesis import gan
from fedfill.synthesis.gan_options import NoisyGANOptions


class FedDPGAN(NoisyGANOptions, FedGAN):
    """A GAN with an auxiliary classifier, trained federatedly, fills every client's data.

    Use it when clients lack classes and may train an image generator together, long before the first round.
    """

    name = "feddpgan"

    gan_chunk: int = Field(default=100, ge=1)
    """Steps of each client's GAN between two averages, which are checkpoints as well."""
    gan_weighting: Literal["uniform"] = Field(default="uniform", exclude_if=lambda value: value == "uniform")
    """Weights of these averages: all equal, as a client with more images would have more to hide."""

    @client_handler
    def train_gan(self, client: Client, message: Common) -> Own:
        """Steps of the common GAN on the client's labelled images, and what they give away."""
        reply = super().train_gan(client, message)
        settings, real, steps = self.gan(client.classes), len(client.data), message.iterations
        multiplier = self.multiplier(real)
        client.release("critic", gan.released("the client's critic", settings, real, steps, multiplier))
        if self.noise == "dpsgd":
            client.release("generator", public("follows from the critic's noisy steps"))
        else:
            client.release("generator", gan.released("the client's generator", settings, real, steps, multiplier))
        return reply
