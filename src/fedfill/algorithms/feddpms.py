"""FedDPMS: Chen and Vikalo, "Federated Learning in Non-IID Settings Aided by Differentially Private Synthetic Data", CVPRW 2023.

The order here is the paper's: algorithm 1 (`round`), preliminary training (section 3.3.1), algorithm 2 (`secondary`),
matching (supplement, section 3), synthesis, training, and DPMS. ``docs/algorithms/feddpms.md`` lists the messages, the
formulas, and every choice where the paper is silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Composable, Contribution, Update
from fedfill.data.samples import Batch, Samples
from fedfill.errors import FedfillError
from fedfill.models.views import part, rest
from fedfill.privacy.accountant import mean_sensitivity
from fedfill.privacy.ledger import gaussian, public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message, Part
from fedfill.protocol.server import Server
from fedfill.synthesis.vae import (
    Bound,
    Reconstruction,
    accepted_codes,
    class_means,
    decode,
    latent_size,
    require_vae,
    vae_loss,
)  # fmt: skip
from fedfill.training.fit import Context
from fedfill.tree import Tree, Weights

FOLLOWS = public("follows from what the server holds")


@dataclass(frozen=True)
class Shared(Part):
    """What one assisting client shared: C_i and Z_i.

    Attributes:
        classes: The client's n most abundant classes.
        counts: Codes of each class.
        codes: ``[sum(counts), l]``, class after class.
    """

    declared: ClassVar = {"classes": unbounded("the n most abundant classes, exact")}

    classes: list[int]
    counts: list[int]
    codes: Tensor


@dataclass(frozen=True)
class Preliminary(Broadcast):
    """Server to client: encoder and classifier; the decoder, where it is averaged every round; whether to upload it."""

    decoder: Weights | None
    upload_decoder: bool


@dataclass(frozen=True)
class PreliminaryReply(Update):
    """Client to server: the trained parts; the decoder in the last preliminary round."""

    declared: ClassVar = {**Update.declared, "decoder": unbounded("local decoder, sent as it is")}

    decoder: Weights | None


@dataclass(frozen=True)
class ScarceRequest(Message):
    """Server to client: which classes does it lack?"""


@dataclass(frozen=True)
class Scarce(Message):
    """Client to server: H_i, its n least abundant classes."""

    declared: ClassVar = {"classes": unbounded("the n least abundant classes, exact")}

    classes: list[int]


@dataclass(frozen=True)
class Secondary(Broadcast):
    """Server to client: encoder and classifier; where due the decoder, other clients' codes, and the request to share.

    Attributes:
        decoder: w_d, for a client that will decode and does not hold it.
        sources: What the client's assistants shared.
        share: Whether the client is not in A yet.
        settled: Whether it is in A and in B: then it needs w_d no more.
    """

    decoder: Weights | None
    sources: list[Shared]
    share: bool
    settled: bool


@dataclass(frozen=True)
class SecondaryReply(Update):
    """Client to server: the trained parts, the size of real and synthetic data together, and what DPMS shares.

    Attributes:
        benefited: Acknowledges that synthetic data were made.
        shared: C_i and Z_i, where any code was accepted.
        acceptance: Rows [class, accepted, drawn] of every filter that ran here.
    """

    declared: ClassVar = {**Update.declared, "benefited": public("acknowledges a download")}

    weights: Weights | None  # type: ignore[assignment]
    benefited: bool
    shared: Shared | None
    acceptance: list[list[int]]


class FedDPMS(Composable):
    """Clients share noisy means of latent codes; others decode from them the classes that they lack.

    Use it when clients lack classes; most of what it gained here came without sharing: try mechanism=none.
    """

    name = "feddpms"
    exchanges = True
    parts = ("encoder", "classifier", "decoder")
    paper: ClassVar = {"": {"model.latent_activation": "sigmoid"}}
    presets: ClassVar = {
        "fashion_mnist": {"alpha": 50, "sigma": 3.0, "n_classes": 3},
        "cifar10": {"alpha": 200, "sigma": 4.0, "n_classes": 3},
        "cifar100": {"alpha": 50, "sigma": 4.0, "n_classes": 10},
    }

    preliminary_rounds: int | None = Field(default=None, ge=1)
    """Rounds of preliminary training (T_p); none: 40 % of all rounds, the paper's best."""
    vae_weight: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Weight of divergence and reconstruction loss beside the cross-entropy (lambda)."""
    reconstruction: Reconstruction = "mse"
    """Reconstruction loss: squared error averaged over pixels (the paper), summed, or binary cross-entropy summed."""
    kl: Literal["sum", "mean"] = "sum"
    """Divergence summed or averaged over the latent's coordinates."""
    decoder_sync: Literal["last", "every"] = "last"
    """Average the decoders once, after the last preliminary round (the paper), or in every preliminary round."""
    secondary_latent: Literal["sample", "mean"] = "sample"
    """What the classifier is trained on in the secondary phase: drawn codes, or the latent means that it sees at test time."""
    n_classes: int = Field(default=3, ge=1)
    """Abundant and scarce classes that a client names (n)."""
    alpha: int = Field(default=50, ge=1)
    """Codes for each shared class (the quota)."""
    sigma: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise on each coordinate of a code; with noise=sensitivity a multiple of the sensitivity."""
    noise: Literal["absolute", "sensitivity"] = "absolute"
    """Whether sigma is the standard deviation itself (equation 1) or a multiple of the mean's l2 sensitivity (definition 2)."""
    latent_bound: Bound | Literal["auto"] = "auto"
    """How codes are bounded before the mean: to [0, 1] (sigmoid), by clipping their norm (clip), or not at all (none); auto: sigmoid where the network has one, else none."""
    latent_clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Norm to which latent_bound=clip clips a code."""
    mechanism: Literal["paper", "public_filter", "single_release", "prior", "none"] = "paper"
    """What is shared: filtered noisy copies (paper), all judged by the public global model (public_filter), one noisy mean a class (single_release), class names alone, whose codes are drawn from a prior (prior), or nothing (none)."""
    release_sigma: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Noise on the one mean of single_release, at most sigma; recipients add the rest."""
    max_candidates: int | None = Field(default=None, ge=1)
    """Draws for each class at the most, and exactly with public_filter; none: 200 times alpha."""
    encoder: Literal["local", "global"] = "local"
    """Which encoder the shared means come from: the client's own after training (the paper), or the one it received."""
    share_at: Literal["first_secondary", "preliminary_end"] = "first_secondary"
    """When clients share: after training in their first secondary round (the paper), or at the end of preliminary training."""
    only_scarce: bool = False
    """Whether a recipient keeps only the classes that it asked for."""
    n_assistants: int = Field(default=1, ge=1)
    """Assisting clients for each recipient, chosen greedily to cover its scarce classes."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Fill in what depends on the rounds and the network, and check what must fit together."""
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        preliminary = self.preliminary_rounds or max(1, round(0.4 * rounds))
        if preliminary > rounds:
            raise FedfillError(f"preliminary_rounds: found {preliminary}; allowed: 1 to rounds, which is {rounds}")
        activation = getattr(model.encoder, "activation", None)
        bound = self.latent_bound
        if bound == "auto":
            bound = "sigmoid" if isinstance(activation, nn.Sigmoid) else "none"
        if bound == "sigmoid" and isinstance(activation, nn.ReLU | nn.Identity):
            raise FedfillError("latent_bound: found 'sigmoid' on a network without one; allowed: auto, clip, none")
        if self.noise == "sensitivity" and bound == "none":
            raise FedfillError("noise: found 'sensitivity' with latent_bound=none, which has none; allowed: absolute")
        if self.noise == "sensitivity" and not self.filters_at_home:
            raise FedfillError(f"noise: found 'sensitivity' with mechanism={self.mechanism}; allowed: absolute")
        if self.mechanism == "single_release" and self.release_sigma > self.sigma:
            raise FedfillError(
                f"release_sigma: found {self.release_sigma}; allowed: at most sigma, which is {self.sigma}"
            )
        if not callable(getattr(model, "sampled_scores", None)):
            raise FedfillError(
                f"model: feddpms needs the method sampled_scores, and {type(model).__name__} lacks it; see docs/algorithms/feddpms.md"
            )
        require_vae(model, inputs, self.name)
        return checked.model_copy(
            update={
                "preliminary_rounds": preliminary,
                "latent_bound": bound,
                "max_candidates": self.max_candidates or 200 * self.alpha,
            }
        )

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Global encoder and classifier, w_d, A with C and Z (`shared`), and B (`benefited`)."""
        return {
            **super().server_state(initial),
            "weights": rest(initial, "decoder"),
            "decoder": part(initial, "decoder") if self.decoder_sync == "every" else None,
            "shared": {},
            "benefited": [],
        }

    def client_state(self) -> dict[str, Tree]:
        """Local decoder (preliminary), local model (share_at=preliminary_end), w_d, and the synthetic set."""
        empty = {"local_decoder": None, "local_weights": None, "decoder": None, "synthetic": None}
        return {**super().client_state(), **empty}

    def global_weights(self, server: Server) -> Weights:
        """Encoder and classifier, with the global decoder once there is one."""
        return {**server.state.weights, **(server.state.decoder or {})}

    def round(self, server: Server, t: int) -> None:
        """Algorithm 1."""
        if t < self.preliminary_rounds:  # type: ignore[operator]
            self.preliminary(server, t)
        else:
            self.secondary(server, t)

    # Preliminary training, section 3.3.1

    def preliminary(self, server: Server, t: int) -> None:
        """Train encoder, classifier and decoder; average the first two, and after the last such round the decoders."""
        last = t == self.preliminary_rounds - 1  # type: ignore[operator]
        every = self.decoder_sync == "every"
        upload = last or every
        message = Preliminary(server.state.weights, server.state.decoder if every else None, upload)
        beside = {"decoder": part(server.initial, "decoder")}
        replies, mean = self.gather(server, self.cohort(server, t), self.preliminary_client, message, beside=beside)
        server.state.weights = mean["weights"]
        if upload:
            if "decoder" not in mean:
                raise FedfillError("feddpms: no client sent its decoder, so there is none to synthesise with")
            server.state.decoder = mean["decoder"]
        if last and self.share_at == "preliminary_end" and self.mechanism != "none":
            ask = Secondary(server.state.weights, server.state.decoder, [], share=True, settled=False)
            self.collect(server, server.call(list(replies), self.share_client, ask))

    @client_handler
    def preliminary_client(self, client: Client, message: Preliminary) -> PreliminaryReply:
        """Train the whole VAE; the decoder stays here until the last preliminary round."""
        decoder = message.decoder or client.state.local_decoder or part(client.initial, "decoder")
        done = self.contribute(client, message, self.preliminary_loss, beside=decoder)
        client.state.local_decoder = None if message.upload_decoder else done.beside
        if self.share_at == "preliminary_end" and client.round == self.preliminary_rounds - 1:  # type: ignore[operator]
            client.state.local_weights = done.trained
        return done.reply(PreliminaryReply, decoder=done.beside if message.upload_decoder else None)

    def preliminary_loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """l1 + lambda (l2 + l3), section 3.2."""
        return vae_loss(model, batch, weight=self.vae_weight, reconstruction=self.reconstruction, kl=self.kl)

    # Secondary training, algorithm 2

    def secondary(self, server: Server, t: int) -> None:
        """Matching, synthesis, training on the augmented sets, DPMS, and the average by augmented size."""
        state = server.state
        cohort = self.cohort(server, t)
        sources = self.matching(server, [i for i in cohort if i not in state.benefited])
        messages = {
            i: Secondary(
                state.weights,
                state.decoder if self.needs_decoder(server, i, recipient=i in sources) else None,
                [state.shared[j] for j in sources.get(i, [])],
                share=self.mechanism != "none" and i not in state.shared,
                settled=i in state.shared and i in state.benefited,
            )
            for i in cohort
        }
        replies, mean = self.gather(server, cohort, self.secondary_client, messages)
        self.collect(server, replies)
        state.weights = mean.get("weights", state.weights)

    @property
    def filters_at_home(self) -> bool:
        """Whether the assistant judges its codes through the decoder before it shares them."""
        return self.mechanism in ("paper", "public_filter")

    def needs_decoder(self, server: Server, i: int, *, recipient: bool) -> bool:
        """Whether client i will decode something in this round and does not hold w_d (algorithm 2, lines 4 and 15).

        A client that filters at home has w_d once it has shared or benefited, and keeps it until the server tells it that
        both have arrived: a reply that is lost on the way can't part what the two believe.
        """
        shared, benefited = i in server.state.shared, i in server.state.benefited
        holds = self.filters_at_home and (shared or benefited)
        return (recipient or (self.filters_at_home and not shared)) and not holds

    def matching(self, server: Server, seekers: Sequence[int]) -> dict[int, list[int]]:
        """Ask the seekers for H_i and find their assistants among A (supplement, algorithm 1)."""
        if not server.state.shared or not seekers:
            return {}
        replies: dict[int, Scarce] = server.call(seekers, self.scarce_classes, ScarceRequest())
        # a class of which no code was accepted helps nobody
        abundant = {
            j: [c for c, k in zip(shared.classes, shared.counts, strict=True) if k or self.mechanism == "prior"]
            for j, shared in server.state.shared.items()
        }
        found = {i: match(i, reply.classes, abundant, self.n_assistants) for i, reply in replies.items()}
        sources = {i: assistants for i, assistants in found.items() if assistants}
        server.note(assistants={str(i): assistants for i, assistants in sources.items()})
        return sources

    @client_handler
    def scarce_classes(self, client: Client, message: ScarceRequest) -> Scarce:
        """Tell H_i."""
        return Scarce(self.scarce(client))

    def scarce(self, client: Client) -> list[int]:
        """H_i: the n classes with the fewest samples, missing ones first, ties by class number."""
        counts = client.data.counts(client.classes)
        return sorted(range(client.classes), key=lambda c: (counts[c], c))[: self.n_classes]

    @client_handler
    def secondary_client(self, client: Client, message: Secondary) -> SecondaryReply:
        """Algorithm 2, lines 2 to 20, on client i."""
        # preliminary training is over, also for clients that missed its last round
        client.state.local_decoder = client.state.local_weights = None
        if message.decoder is not None or message.settled:
            client.state.decoder = message.decoder
        acceptance: list[list[int]] = []
        if message.sources:
            model = client.model({**message.weights, **client.state.decoder})
            sources = [self.keep(source, self.scarce(client)) for source in message.sources]
            synthetic, acceptance = self.synthesise(model, sources, client.stream("synthesis"), client.check)
            if len(synthetic):
                client.state.synthetic = synthetic

        data = client.data + client.state.synthetic
        done = self.contribute(client, message, self.loss, data=data, samples_per_epoch=len(client.data))

        shared: Shared | None = None
        if message.share:
            shared, tried = self.dpms(client, message.weights, done.trained)
            acceptance = acceptance + tried
        return self.reply(client, done, shared, acceptance)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """l1 alone: the cross-entropy of the secondary phase."""
        if self.secondary_latent == "mean":
            return super().loss(model, batch, context)
        return nn.functional.cross_entropy(model.sampled_scores(batch.inputs), batch.labels)  # type: ignore[operator]

    @client_handler
    def share_client(self, client: Client, message: Secondary) -> SecondaryReply:
        """DPMS at the end of preliminary training, with the local model of that round."""
        client.state.decoder = message.decoder
        shared, acceptance = self.dpms(client, message.weights, client.state.local_weights)
        client.state.local_weights = None
        return self.reply(client, None, shared, acceptance)

    # Data synthesis

    def keep(self, source: Shared, scarce: Sequence[int]) -> Shared:
        """All classes of the assistant, or only those that the recipient asked for."""
        if not self.only_scarce:
            return source
        wanted = [k for k, c in enumerate(source.classes) if c in scarce]
        codes = torch.split(source.codes, source.counts)
        return Shared(
            [source.classes[k] for k in wanted],
            [source.counts[k] for k in wanted],
            torch.cat([source.codes[:0], *(codes[k] for k in wanted)]),
        )

    def synthesise(
        self,
        model: nn.Module,
        sources: Sequence[Shared],
        generator: torch.Generator,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Samples, list[list[int]]]:
        """Synthetic images from shared codes, with the global decoder.

        Codes of `paper` and `public_filter` are decoded as they are. For `single_release` and `prior` the recipient draws
        alpha codes around each centre itself, filtered by the global model: nothing here touches private data.

        Args:
            model: Holds the global encoder, classifier and decoder, in evaluation mode.
            sources: What the assistants shared.
            generator: Stream of the recipient's draws.
            check: Called again and again; what it raises ends the work.

        Returns:
            Images with labels, and rows [class, accepted, drawn].
        """
        codes, labels, acceptance = [], [], []
        for source in sources:
            for label, own in zip(source.classes, torch.split(source.codes, source.counts), strict=True):
                if self.mechanism in ("single_release", "prior"):
                    centre = own[0] if len(own) else own.new_full((own.shape[1],), self.prior_centre)
                    own, drawn = accepted_codes(
                        model, centre, self.public_std, label, quota=self.alpha, candidates=self.max_candidates or 0,
                        exhaust=False, generator=generator, check=check,
                    )  # fmt: skip
                    acceptance.append([label, len(own), drawn])
                codes.append(own)
                labels += [label] * len(own)
        images = decode(model, torch.cat([sources[0].codes[:0], *codes]))
        return Samples(images, torch.tensor(labels, dtype=torch.int64, device=images.device)), acceptance

    @property
    def prior_centre(self) -> float:
        """Every coordinate of the prior's mean: 1/2 where the codes are bounded to [0, 1], else 0."""
        return 0.5 if self.latent_bound == "sigmoid" else 0.0

    @property
    def public_std(self) -> float:
        """The noise that a recipient adds, so that a code's total noise has standard deviation sigma."""
        if self.mechanism == "single_release":
            return math.sqrt(self.sigma**2 - self.release_sigma**2)
        return self.sigma

    # DPMS: differentially private means sharing

    def dpms(self, client: Client, received: Weights, local: Weights) -> tuple[Shared | None, list[list[int]]]:
        """Noisy latent means of the n most abundant classes (equations 1 and 2).

        Args:
            client: The assisting client.
            received: The global encoder and classifier of this round.
            local: The client's own, after training.

        Returns:
            What is shared, None where no code was accepted, and rows [class, accepted, drawn].
        """
        counts = client.data.counts(client.classes)
        ranked = sorted((c for c in range(client.classes) if counts[c]), key=lambda c: (-counts[c], c))
        classes = ranked[: self.n_classes]
        if self.mechanism == "prior":
            nothing = client.data.inputs.new_empty(
                0, latent_size(client.model(received), client.data), dtype=torch.float32
            )
            return Shared(classes, [0] * len(classes), nothing), []

        encoder = part(received if self.encoder == "global" else local, "encoder")
        means = class_means(
            client.model({**local, **encoder}), client.data, classes, self.bound, self.latent_clip
        )  # [n, l]
        sensitivity = {c: self.sensitivity(means.shape[1], counts[c]) for c in classes}
        unit = {c: 1.0 if self.noise == "absolute" else sensitivity[c] for c in classes}
        generator = client.noise("dpms")
        codes: list[Tensor] = []
        acceptance: list[list[int]] = []
        if self.mechanism == "single_release":
            for mean in means:
                noise = torch.empty_like(mean).normal_(generator=generator)
                codes.append((mean + self.release_sigma * noise)[None])
        else:
            judge = client.model({**(received if self.mechanism == "public_filter" else local), **client.state.decoder})
            for mean, c in zip(means, classes, strict=True):
                accepted, drawn = accepted_codes(
                    judge, mean, self.sigma * unit[c], c, quota=self.alpha, candidates=self.max_candidates or 0,
                    exhaust=self.mechanism == "public_filter", generator=generator, check=client.check,
                )  # fmt: skip
                codes.append(accepted)
                acceptance.append([c, len(accepted), drawn])
        rarest = classes[-1]
        # the one mean of single_release takes absolute noise alone, so its unit is 1
        scale = self.release_sigma if self.mechanism == "single_release" else self.sigma
        self.declare(client, sensitivity[rarest], scale * unit[rarest])
        if not any(len(own) for own in codes):
            return None, acceptance
        return Shared(classes, [len(own) for own in codes], torch.cat(codes)), acceptance

    def sensitivity(self, latent: int, count: int) -> float:
        """How far one record can move a class mean, in l2; infinite without a bound."""
        return mean_sensitivity(latent, count, self.bound, self.latent_clip)

    @property
    def bound(self) -> Bound:
        """`latent_bound` once it is resolved."""
        return "none" if self.latent_bound == "auto" else self.latent_bound

    def declare(self, client: Client, sensitivity: float, std: float) -> None:
        """Tell the ledger what the codes release.

        Args:
            client: The assisting client.
            sensitivity: Of the class with the fewest samples. One record is in one class, so the classes compose in
                parallel and the worst of them counts.
            std: Noise on that class's mean.
        """
        copies = {"paper": self.alpha, "public_filter": self.max_candidates or 0, "single_release": 1}[self.mechanism]
        conditions = ["the encoder counts as fixed, although it was trained on the same records"]
        if self.mechanism == "paper":
            conditions.append(
                "the choice of copies counts as public, although a classifier trained on the same records made it"
            )
        if self.noise == "sensitivity":
            conditions.append("class sizes count as public, although the scale of the noise tells them")
        words = f"std {std:g}" if self.noise == "absolute" else f"std {std / sensitivity:g} times the sensitivity"
        met = self.mechanism != "paper"
        client.release(
            "shared.codes",
            gaussian("class means of latent codes", sensitivity, std, copies, conditions, met=met, noise=words),
        )
        accepted = FOLLOWS if met else unbounded("what the local classifier accepted")
        client.release("shared.counts", accepted)
        client.release("acceptance", accepted)

    # What both sides of the sharing keep

    def reply(
        self, client: Client, done: Contribution | None, shared: Shared | None, acceptance: list[list[int]]
    ) -> SecondaryReply:
        """A reply, and what it declares beside its codes."""
        if shared is None and "shared.codes" not in client.releases:
            client.release("acceptance", FOLLOWS)
        elif shared is None:
            # what was declared for the codes stays: that none was accepted tells as much as sending the candidates. And the rows
            # of `acceptance` are those of C_i
            client.release("shared.classes", Shared.declared["classes"])
        if shared is not None and self.mechanism == "prior":
            for name in ("shared.counts", "shared.codes", "acceptance"):
                client.release(name, public("holds nothing of the client's data"))
        if done is None:
            return SecondaryReply(None, 0, False, shared, acceptance)
        benefited = client.state.synthetic is not None
        return done.reply(SecondaryReply, benefited=benefited, shared=shared, acceptance=acceptance)

    def flaw(self, server: Server, reply: SecondaryReply) -> str | None:
        """Why what a client shares makes no sense: other clients would decode it, and take their labels from it."""
        most = self.max_candidates or 0
        if len(reply.acceptance) > server.clients * server.classes or not all(
            len(row) == 3 and 0 <= row[0] < server.classes and 0 <= row[1] <= row[2] <= most for row in reply.acceptance
        ):
            return "'acceptance' holds what is no [class, accepted, drawn]"
        if reply.shared is None:
            return None
        classes, counts, codes = reply.shared.classes, reply.shared.counts, reply.shared.codes
        if (
            len(classes) != len(counts)
            or len(set(classes)) != len(classes)
            or not all(0 <= c < server.classes for c in classes)
            or not all(0 <= k <= most for k in counts)
        ):
            return "'classes' and 'counts' are no classes with their numbers of codes"
        latent = latent_size(server.model(self.global_weights(server)), server.sample)
        if codes.dtype != torch.float32 or codes.shape != (sum(counts), latent):
            return f"'codes' is {codes.dtype} of shape {list(codes.shape)}, not [{sum(counts)}, {latent}]"
        return None

    def collect(self, server: Server, replies: Mapping[int, SecondaryReply]) -> None:
        """Extend A, B, C and Z by what arrived, and record how the filter did."""
        state = server.state
        flaws = {i: flaw for i, reply in replies.items() if (flaw := self.flaw(server, reply)) is not None}
        for i, flaw in flaws.items():
            server.lose(i, "DPMS", flaw)
        replies = {i: reply for i, reply in replies.items() if i not in flaws}
        for i, reply in replies.items():
            if reply.shared is not None:
                state.shared = {**state.shared, i: reply.shared}
            if reply.benefited and i not in state.benefited:
                state.benefited = sorted([*state.benefited, i])
        tried = [(i, c, accepted, drawn) for i, reply in replies.items() for c, accepted, drawn in reply.acceptance]
        if not tried:
            return
        record: dict[str, dict[str, dict[str, int]]] = {}
        for i, c, accepted, drawn in tried:
            row = record.setdefault(str(i), {}).setdefault(str(c), {"accepted": 0, "drawn": 0})
            row["accepted"] += accepted
            row["drawn"] += drawn
        server.note(acceptance=record)
        short = [(i, c) for i, c, accepted, _ in tried if accepted < self.alpha]
        never = sorted({c for _, c, _, _ in tried} - {c for _, c, accepted, _ in tried if accepted})
        if short:
            server.warn(
                f"the filter accepted fewer than alpha={self.alpha} codes for {len(short)} of {len(tried)} shared classes "
                f"(client {short[0][0]}, class {short[0][1]} among them)"
                + (f", and none at all of class {', '.join(map(str, never))}" if never else "")
                + "; a young decoder emits nearly the same image for every code: more preliminary_rounds or local_epochs, or "
                "a smaller sigma, may help"
            )

    def synthetic(self, server: Server) -> Samples | None:
        """Images of everything that was shared, as a recipient would make them."""
        if not server.state.shared:
            return None
        model = server.model({**server.state.weights, **server.state.decoder})
        return self.synthesise(model, list(server.state.shared.values()), server.stream("samples"))[0]


def match(i: int, scarce: Sequence[int], abundant: Mapping[int, Sequence[int]], assistants: int = 1) -> list[int]:
    """R_i: the clients whose abundant classes cover most of client i's scarce ones (supplement, algorithm 1).

    With more than one assistant the next is chosen for the classes that are still uncovered. Ties go to the lowest
    number; a client never assists itself; where nobody covers anything there is no assistant.

    Args:
        i: The recipient.
        scarce: H_i.
        abundant: C_j of every client j in A.
        assistants: How many at the most.

    Returns:
        Client numbers, the best first.
    """
    open_classes = set(scarce)
    chosen: list[int] = []
    while open_classes and len(chosen) < assistants:
        best = max(
            (j for j in sorted(abundant) if j != i and j not in chosen),
            key=lambda j: len(open_classes & set(abundant[j])),
            default=None,
        )
        if best is None or not open_classes & set(abundant[best]):
            break
        chosen.append(best)
        open_classes -= set(abundant[best])
    return chosen
