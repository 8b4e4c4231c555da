"""Networks in named parts: a classifier on an encoder, and an auto-encoder with a classifier on its codes."""

from __future__ import annotations

from torch import Tensor, nn

from fedfill.models.layers import Gaussian


class Encoder(nn.Module):
    """Trunk and latent layer.

    Args:
        trunk: Maps ``[b, channels, side, side]`` to ``[b, features]``.
        features: Size of the trunk's output.
        latent: Size l of the latent layer.
        activation: Of the latent means.
    """

    def __init__(self, trunk: nn.Module, features: int, latent: int, activation: str) -> None:
        super().__init__()
        self.trunk = trunk
        self.mu = nn.Linear(features, latent)
        self.activation: nn.Module = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "none": nn.Identity}[activation]()
        self.logvar: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Latent means mu(x), ``[b, l]``."""
        return self.activation(self.mu(self.trunk(x)))  # type: ignore[no-any-return]

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent means and logarithms of variances, ``[b, l]`` each."""
        if self.logvar is None:
            raise RuntimeError("this encoder has no logvar head")
        h = self.trunk(x)  # [b, features]
        return self.activation(self.mu(h)), self.logvar(h)


class Classifier(nn.Module):
    """Encoder and classifier: the network of the baselines.

    Args:
        encoder: Maps images to latent means, or to features.
        classifier: Maps latent codes ``[b, l]``, or what the projection makes of them, to class scores ``[b, classes]``.
        projection: Maps latent codes to ``[b, d]``; None: there is no head between encoder and classifier.

    Attributes:
        personal: A second classifier, for algorithms that train one beside; `forward` leaves it out.
    """

    personal: nn.Module

    def __init__(self, encoder: nn.Module, classifier: nn.Module, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Class scores ``[b, classes]`` from the latent means."""
        return self.scores(self.encoder(x))

    def scores(self, z: Tensor) -> Tensor:
        """Class scores ``[b, classes]`` of latent codes ``[b, l]``."""
        return self.classifier(z if self.projection is None else self.projection(z))  # type: ignore[no-any-return]


class VAEClassifier(Classifier):
    """A classifier on latent codes with a decoder beside it (FedDPMS, section 3.2).

    Args:
        encoder: With a logvar head.
        classifier: Maps latent codes to class scores.
        decoder: Maps latent codes ``[b, l]`` to images in (0, 1), ``[b, channels, side, side]``.
        projection: As in `Classifier`.
    """

    encoder: Encoder

    def __init__(
        self, encoder: Encoder, classifier: nn.Module, decoder: nn.Module, projection: nn.Module | None = None
    ) -> None:
        super().__init__(encoder, classifier, projection)
        self.decoder = decoder
        self.draw = Gaussian()

    def reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Class scores of a drawn code and its reconstruction.

        Args:
            x: Normalised images, ``[b, channels, side, side]``.

        Returns:
            Scores ``[b, classes]``, images in (0, 1) of x's shape, means ``[b, l]`` and logvars ``[b, l]``.
        """
        mu, logvar = self.encoder.distribution(x)
        z = self.draw(mu, logvar)  # [b, l]
        return self.scores(z), self.decoder(z), mu, logvar

    def sampled_scores(self, x: Tensor) -> Tensor:
        """Class scores ``[b, classes]`` of a drawn code."""
        return self.scores(self.draw(*self.encoder.distribution(x)))
