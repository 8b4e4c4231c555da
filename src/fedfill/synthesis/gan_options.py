"""Settings of algorithms whose clients train GANs, with noise on the critic's steps or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedfill.data.samples import Samples
from fedfill.privacy.keyed import KeyedStream
from fedfill.synthesis import gan
from fedfill.synthesis.gan import GAN
from fedfill.synthesis.gan_networks import GANSettings, Noise


class GANOptions(BaseModel):
    """The settings of an algorithm whose clients train GANs."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # the texts below are what 'fedfill list settings' shows

    gan_iterations: int = Field(default=18_000, ge=1)
    """Steps of the generator in the pre-training, each after `gan_critic_steps` of the critic."""
    gan_chunk: int = Field(default=500, ge=1)
    """Steps of the generator between two checkpoints."""
    gan_batch_size: int = Field(default=64, ge=1)
    """Real images in a step of the critic; where these steps are noisy, the expected number."""
    gan_critic_steps: int = Field(default=5, ge=1)
    """Steps of the critic for each of the generator."""
    gan_learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Of Adam, for generator and critic."""
    gan_penalty: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Weight of the gradient penalty (gamma)."""
    gan_latent: int = Field(default=100, ge=1, le=4096)
    """Size of the generator's noise."""
    gan_width: int = Field(default=64, ge=1, le=1024)
    """Channels of the widest layers of generator and critic; the others have two and four times as many."""
    gan_average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average of the generator that makes the images; 0: the generator itself does."""

    def gan(self, classes: int = 0) -> GANSettings:
        """How the GANs are built and trained.

        Args:
            classes: Of the auxiliary classifier; 0: there is none.

        Returns:
            Their settings.
        """
        return GANSettings(
            latent=self.gan_latent, width=self.gan_width, classes=classes, batch_size=self.gan_batch_size,
            critic_steps=self.gan_critic_steps, learning_rate=self.gan_learning_rate, penalty=self.gan_penalty,
            average=self.gan_average,
        )  # fmt: skip

    def multiplier(self, real: int) -> float:
        """The noise on the critic's steps for so many real images; 0: there is none."""
        return 0.0

    def advance(
        self, now: GAN | None, data: Samples, iterations: int, settings: GANSettings, draws: Draws,
        wanted: list[int] | None = None,
    ) -> GAN:  # fmt: skip
        """Train a client's GAN until it has done so many steps.

        Args:
            now: Where it stands; None: at its start.
            data: The client's real images.
            iterations: Steps of the generator altogether.
            settings: How it is built.
            draws: The client's streams.
            wanted: Classes that it learns to make; None: all.

        Returns:
            Where it stands then.
        """
        now = now or gan.start(tuple(data.inputs.shape[1:]), settings, draws.stream("gan start"))
        if (left := iterations - now.iterations) <= 0:
            return now
        streams = draws.stream("gan"), draws.noise("gan noise")
        return gan.train(now, data, left, settings, *streams, self.multiplier(len(data)), draws.check, wanted)


class NoisyGANOptions(GANOptions):
    """The same, where noise may protect the images."""

    noise: Noise = "none"
    """Noise on the critic's gradients: none, dpsgd (clipped per image and accounted), or paper_eq3, which is not private."""
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """With noise=dpsgd: largest norm of one image's gradient."""
    target_epsilon: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """With noise=dpsgd: epsilon of the whole pre-training for one image that is added or removed; with paper_eq3 the epsilon of that equation."""
    target_delta: float = Field(default=1e-5, ge=1e-12, lt=1)
    """Delta of `target_epsilon`; the accountant's own rounding is below 1e-14, so it tells nothing of less than 1e-12."""

    def gan(self, classes: int = 0) -> GANSettings:
        """How the GANs are built and trained, with the noise on the critic's gradients."""
        return replace(
            super().gan(classes), noise=self.noise, clip=self.clip, target_epsilon=self.target_epsilon, delta=self.target_delta,
        )  # fmt: skip

    def multiplier(self, real: int) -> float:
        """The noise of ``dpsgd`` for so many real images, from what the whole pre-training may cost; 0 without."""
        return self.gan().noise_multiplier(real, self.gan_iterations) if self.noise == "dpsgd" else 0.0


class Draws(Protocol):
    """Where a training gets its randomness from, such as a client."""

    def stream(self, purpose: str) -> torch.Generator:
        """Draws that everybody may repeat."""
        ...

    def noise(self, purpose: str) -> KeyedStream:
        """Draws that protect the data."""
        ...

    def check(self) -> None:
        """End what runs where it is no longer wanted."""
        ...
