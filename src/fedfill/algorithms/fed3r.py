"""Fed3R: Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers", ICML 2024.

AFL (He et al., CVPR 2025) has the same solution, by inverses that clients send in place of sums. See ``docs/algorithms/fed3r.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._heads import Head
from fedfill.algorithms._layers import Ask, Layer, changed, features
from fedfill.errors import FedfillError
from fedfill.privacy import sums as privacy
from fedfill.protocol.client import BoundHandler, Client
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, Sums, collect, contribute
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.number_ridge import Centred, number_moments
from fedfill.statistics.ridge import Choice, Spectrum, choose_lambda, lambdas, leave_one_out, noisy_ridge
from fedfill.statistics.sums import NO_BOUND, Block, Statistic, class_moments, one_hot
from fedfill.statistics.temperature import robust_scale
from fedfill.tree import Weights

HELD_OUT = 10
"""One of so many records of a client is left out of the sums with ridge_lambda=holdout, and tries the heads."""


@dataclass(frozen=True)
class AskErrors(Ask):
    """Server to client: the request for the errors of one head for each lambda.

    Attributes:
        lambdas: All that are tried, ``[L]``.
        heads: Of each, W, ``[L, d, classes]``; None where each record is left out of the head that it tries.
        decomposition: In that case eigenvalues ``[d]`` and eigenvectors ``[d, d]`` of G, and V'M ``[d, classes]``: all these
            heads follow from it.
    """

    lambdas: Tensor
    heads: Tensor | None
    decomposition: Weights | None


class Fed3R(Head):
    """Ridge regression on one-hot labels, from the sums of z z' and z e_y' over all records, in one round.

    Use it first where clients lack classes: every split gives the same model, and many records bear noise well.
    """

    name = "fed3r"
    numbers = True

    ridge_lambda: Literal["gcv", "evidence", "loo", "holdout"] | Annotated[float, Field(ge=0, le=1e100)] = "gcv"
    """Ridge penalty: chosen by generalised cross-validation (gcv) or by the evidence (evidence), both from the sums alone; by the errors of leaving each record out (loo), or of a tenth of each client's records, which are then in no sum (holdout), both in a second exchange; or a number. Under noise a multiple of the noise's largest eigenvalue, by rule an eighth, of a number a half."""
    column_norm: bool = False
    """Whether each class's weights are scaled to length 1, a heuristic against uneven classes."""

    scale: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"
    """What the head is multiplied by, which changes no prediction: its softmax shall be as sharp as it is right, so that probabilities mean something and training can go on from it (auto: by the spread of the scores, from the sums alone, and 1 under noise)."""

    def check_network(self, model: nn.Module, inputs: Tensor) -> None:
        """Refuse what the noisy ridge does not have."""
        if self.column_norm and self.target_epsilon is not None:
            raise FedfillError(
                "column_norm: found true with a target_epsilon, whose noise it would raise for rare classes; allowed: false"
            )
        if self.asks_again and self.column_norm:
            raise FedfillError(
                f"column_norm: found true with ridge_lambda={self.ridge_lambda}, whose errors are of heads as least squares has them; allowed: false"
            )
        if self.asks_again and self.target_epsilon is not None:
            raise FedfillError(
                f"ridge_lambda: found {self.ridge_lambda} with a target_epsilon, under which the sums of errors would be mostly noise; "
                "allowed: gcv, for which it takes a share of the noise's edge by rule, or a number, a multiple of that edge"
            )
        if Layer.of(model, inputs, self.name).classes == 1:
            self.check_number()
        super().check_network(model, inputs)

    def check_number(self) -> None:
        """Refuse what a regression of a number does not have: it is ridge with an intercept."""
        for name, plain in (("column_norm", False), ("scale", "auto")):
            if (found := getattr(self, name)) != plain:
                raise FedfillError(f"{name}: found {found} with a single score, of a number; allowed: {plain}")
        if self.asks_again:
            raise FedfillError(
                f"ridge_lambda: found {self.ridge_lambda}, whose errors are of classes, with a single score, of a number; allowed: gcv, "
                "evidence or a number"
            )

    @property
    def asks_again(self) -> bool:
        """Whether lambda is chosen by errors, in a second exchange."""
        return self.ridge_lambda in ("loo", "holdout")

    def statistic(self, layer: Layer) -> Statistic:
        """G, M, and without noise N: the noisy ridge needs no counts. Of a number also its sums, for the intercept."""
        if layer.classes == 1:
            return number_moments(layer.features, layer.radius, stepped=self.target_epsilon is not None)
        return class_moments(layer.features, layer.classes, radius=layer.radius, counts=self.target_epsilon is None)

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead:
        """W = (G + lambda I)^-1 M; of a number with an intercept."""
        if layer.classes == 1:
            return self.regression(server, collected)
        sums, std = collected.sums, collected.stds["gram"] / math.sqrt(2)
        if std:
            # where all feature vectors are of this length the trace tells how many there are, else fewer
            n = float(sums["gram"].trace()) / layer.radius**2
            strength = None if isinstance(self.ridge_lambda, str) else self.ridge_lambda
            head = noisy_ridge(sums["gram"], sums["moments"], n, std, strength=strength)
            tau = 1.0 if self.scale == "auto" else self.scale
            return LinearHead(tau * head.weight, tau * head.bias)
        spectrum, given = Spectrum.of(sums["gram"], sums["moments"]), self.ridge_lambda
        if isinstance(given, str):
            rule: Literal["gcv", "evidence"] = "evidence" if given == "evidence" else "gcv"
            choice = choose_lambda(spectrum, float(sums["counts"].sum()), rule)
            self.warn_of_the_end(server, choice)
            given = choice.lam
        return self.head_for(server, given, spectrum, sums)

    def regression(self, server: Server, collected: Collected) -> LinearHead:
        """The head of a number, with the lambda of the rule."""
        centred, given = Centred.of(collected.sums), self.ridge_lambda
        if collected.stds["gram"]:
            head = centred.noisy_head(collected.stds, None if isinstance(given, str) else given)
            if not bool(head.weight.any()):
                server.warn(
                    f"target_epsilon: with {self.target_epsilon:g} and trust={self.trust} what the columns tell of the number does not stand "
                    "out of the noise, and the model says the mean; what helps: a larger one, more rows, narrower bounds of the target, or "
                    "trust=secure or server"
                )
            return head
        if isinstance(given, str):
            rule: Literal["gcv", "evidence"] = "evidence" if given == "evidence" else "gcv"
            choice = choose_lambda(centred.spectrum, centred.degrees, rule)
            self.warn_of_the_end(server, choice)
            given = choice.lam
        server.note(ridge_lambda=given, effective_parameters=centred.spectrum.effective_parameters(given))
        return centred.head(given)

    def head_for(self, server: Server, lam: float, spectrum: Spectrum, sums: Weights) -> LinearHead:
        """The head for one lambda, from sums without noise."""
        counts = sums["counts"]
        server.note(ridge_lambda=lam, effective_parameters=spectrum.effective_parameters(lam))
        tau = self.scale if self.scale != "auto" else sharpness(spectrum, lam, sums)
        head = spectrum.solution(lam, counts, self.column_norm)
        if self.column_norm and self.scale == "auto":  # on the scale of the scores that tau was found for
            tau *= float(spectrum.solution(lam).weight.norm(dim=1)[counts > 0].mean())
        return LinearHead(tau * head.weight, tau * head.bias)

    def warn_of_the_end(self, server: Server, choice: Choice) -> None:
        """Say where there may be a better lambda than all that were tried."""
        if choice.end is not None:
            server.warn(f"ridge_lambda: {self.ridge_lambda} chose the {choice.end} of its grid, {choice.lam:g}.")

    def warn_of(self, server: Server, collected: Collected) -> None:
        """As every head; a number has no classes to be warned of."""
        if "numbers" not in collected.sums:
            super().warn_of(server, collected)

    # Lambda by errors, in a second exchange

    def fit_head(self, server: Server, weights: Weights, handler: BoundHandler) -> Weights:
        """As every head; where lambda is chosen by errors, everybody is asked for these too."""
        if server.classes == 1:
            layer, collected = self.ask(server, weights, handler)
            return {**weights, **layer.holding(self.regression(server, collected), weights)}
        if not self.asks_again:
            return super().fit_head(server, weights, handler)
        layer, collected = self.ask(server, weights, handler)
        sums = collected.sums
        spectrum = Spectrum.of(sums["gram"], sums["moments"])
        tried = lambdas(spectrum, float(sums["counts"].sum()))
        holdout = self.ridge_lambda == "holdout"
        message = AskErrors(
            changed(server, weights),
            server.clients,
            torch.tensor(tried, dtype=torch.float64),
            torch.stack([spectrum.solution(lam).weight.T for lam in tried]) if holdout else None,
            None if holdout else dict(vars(spectrum)),
        )
        found = collect(server, handler, message, self.errors(message), None, purpose="errors").sums
        n = float(found["records"])
        if not n:
            raise FedfillError(
                f"ridge_lambda: found holdout, and no client has {HELD_OUT} records, of which one is held out; allowed: gcv, evidence, "
                "loo or a number"
            )
        # errors are whole numbers, and many lambdas may have equally many; squares break the tie
        scores = (found["errors"] + 0.5 * found["squares"] / (1 + found["squares"].max())).tolist()
        choice = Choice.least(tried, scores)
        self.warn_of_the_end(server, choice)
        server.note(error_left_out=float(found["errors"][tried.index(choice.lam)]) / n)
        return {**weights, **layer.holding(self.head_for(server, choice.lam, spectrum, sums), weights)}

    def errors(self, message: AskErrors) -> Statistic:
        """For each lambda the errors and the squared residuals of records that are not in the head which they try."""
        tried = message.lambdas.tolist()

        def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
            for k, lam in enumerate(tried):
                if message.heads is None:
                    squares, wrong = leave_one_out(Spectrum(**message.decomposition or {}), lam, z, labels)
                else:
                    scores = z @ message.heads[k]
                    targets = one_hot(labels, scores.shape[1])
                    squares, wrong = (targets - scores).square().sum(1), scores.argmax(1) != labels
                sums["squares"][k] += squares.sum()
                sums["errors"][k] += wrong.sum()
            sums["records"] += len(z)

        shape = (len(tried),)
        blocks = {
            "squares": Block(shape, privacy.other(NO_BOUND, len(tried))),
            "errors": Block(shape, privacy.other(math.sqrt(len(tried)), len(tried)), bits=0),
            "records": Block((1,), privacy.counts(1), bits=0),
        }
        return Statistic(blocks, add, "errors of heads on records that they have not seen")

    def answer(self, client: Client, weights: Weights, message: Ask) -> Sums:
        """Sums over the features, or of errors where these are asked for."""
        if not isinstance(message, AskErrors):
            return super().answer(client, weights, message)
        layer = Layer.of(client.model(weights), client.blank, self.name)
        held = self.ridge_lambda == "holdout"
        records = self.part(client, weights, layer, held=True) if held else features(client, weights, layer)
        return contribute(client, self.errors(message), records, None, message.clients, purpose="errors")

    def records(self, client: Client, weights: Weights, layer: Layer) -> Iterator[tuple[Tensor, Tensor]]:
        """All of the client's, but for those that are held out."""
        if self.ridge_lambda == "holdout":
            return self.part(client, weights, layer, held=False)
        return super().records(client, weights, layer)

    def part(self, client: Client, weights: Weights, layer: Layer, *, held: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """The records that are held out, or the others; which these are doesn't depend on what they hold."""
        n, done = len(client.data), 0
        chosen = torch.randperm(n, generator=client.stream("held out"), device=client.data.labels.device)[
            : n // HELD_OUT
        ]
        mask = torch.zeros(n, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, value=True)
        for z, labels in features(client, weights, layer):
            wanted = mask[done : done + len(z)] == held
            done += len(z)
            yield z[wanted], labels[wanted]


def sharpness(spectrum: Spectrum, lam: float, sums: Weights) -> float:
    """What the head for lambda is multiplied by (ours), from the moments of the scores of records that it has not seen.

    A record that is left out has the residual r / (1 - h), with its leverage h. As in generalised cross-validation,
    the mean leverage df / n stands for each. Then the mean scores of a record's own class and of another are
    (a - h) / (1 - h) and b / (1 - h), and their variance is v / (1 - h)^2. The difference of two scores is
    given twice the variance, as if they were independent; they are not (docs/algorithms/fed3r.md).

    Args:
        spectrum: Of the sums, without noise.
        lam: Lambda.
        sums: M ``[d, C]`` as ``moments``, and N ``[C]`` as ``counts``.

    Returns:
        From 1 to 1,000.
    """
    counts, classes = sums["counts"], len(sums["counts"])
    n, weight = float(counts.sum()), spectrum.solution(lam).weight
    own = float((weight * sums["moments"].T).sum()) / n
    other = (float((weight @ sums["moments"].sum(1)).sum()) / n - own) / max(classes - 1, 1)
    variance = float(spectrum.residuals(lam, counts).sum()) / (n * classes)
    variance -= ((1 - own) ** 2 + (classes - 1) * other**2) / classes
    free = 1 - spectrum.effective_parameters(lam) / n
    return robust_scale((own - (1 - free) - other) / free, 2 * variance / free**2, classes) if free > 0 else 1.0
