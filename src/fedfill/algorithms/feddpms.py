"""FedDPMS: Chen and Vikalo, "Federated Learning in Non-IID Settings Aided by Differentially Private Synthetic Data", CVPRW 2023.

In the paper's order. Equations 1 and 2: `fedfill.synthesis.noisy_means`. Every choice: ``docs/algorithms/feddpms.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Composable, Update
from fedfill.algorithms._layers import Ask, changed
from fedfill.algorithms._matching import Matching, Scarce
from fedfill.data.samples import Batch, Samples
from fedfill.errors import FedfillError
from fedfill.models.views import part, rest
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.relay import Delivered
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute, sound_counts, warn_of_absent
from fedfill.synthesis.global_means import require_default
from fedfill.synthesis.noisy_means import FOLLOWS, NoisyMeans, Shared
from fedfill.synthesis.vae import VAEOptions, class_means, latent_size, require_vae
from fedfill.training.fit import Context
from fedfill.tree import Tree, Weights


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
class Secondary(Broadcast):
    """Server to client: encoder and classifier; where due the decoder, other clients' codes, and the request to share.

    Attributes:
        decoder: w_d, for a client that will decode and does not hold it.
        sources: What the client's assistants shared.
        share: Whether the client is not in A yet.
        settled: Whether it is in A and in B: then it needs w_d no more.
        agreed: n and alpha, where they were agreed upon.
    """

    decoder: Weights | None
    sources: list[Shared]
    share: bool
    settled: bool
    agreed: list[int] | None = field(default=None, kw_only=True)


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


class FedDPMS(NoisyMeans, Matching, VAEOptions, Composable):
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
    decoder_sync: Literal["last", "every"] = "last"
    """Average the decoders once, after the last preliminary round (the paper), or in every preliminary round."""
    secondary_latent: Literal["sample", "mean"] = "sample"
    """What the classifier is trained on in the secondary phase: drawn codes, or the latent means that it sees at test time."""
    encoder: Literal["local", "global"] = "local"
    """Which encoder the shared means come from: the client's own after training (the paper), or the one it received."""
    share_at: Literal["first_secondary", "preliminary_end"] = "first_secondary"
    """When clients share: after training in their first secondary round (the paper), or at the end of preliminary training."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Fill in what depends on the rounds and the network, and check what must fit together."""
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        preliminary = self.preliminary_rounds or max(1, round(0.4 * rounds))
        if preliminary > rounds:
            raise FedfillError(f"preliminary_rounds: found {preliminary}; allowed: 1 to rounds, which is {rounds}")
        if self.means == "global":
            require_default(self, ("share_at", "n_assistants"), "with means=global, where no client assists")
        require_vae(model, inputs, self.name, methods=("sampled_scores", "reconstruct"))
        return checked.model_copy(update={"preliminary_rounds": preliminary, **self.mechanism_resolved(model, inputs)})

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Global encoder and classifier, w_d, A with C and Z (`shared`), B (`benefited`); what `Matching` and `means` need."""
        decoder = part(initial, "decoder") if self.decoder_sync == "every" else None
        kept = {"shared": {}, "benefited": [], "holders": Delivered(), "agreed": None, "means": None}
        return {**super().server_state(initial), "weights": rest(initial, "decoder"), "decoder": decoder, **kept}

    def client_state(self) -> dict[str, Tree]:
        """Local decoder (preliminary), local model (share_at=preliminary_end), w_d, and the synthetic set."""
        return {**super().client_state(), **dict.fromkeys(("local_decoder", "local_weights", "decoder", "synthetic"))}

    def global_weights(self, server: Server) -> Weights:
        """Encoder and classifier, with the global decoder once there is one."""
        return {**server.state.weights, **(server.state.decoder or {})}

    def round(self, server: Server, t: int) -> None:
        """Algorithm 1."""
        (self.preliminary if t < (self.preliminary_rounds or 0) else self.agree(server).secondary)(server, t)

    # Preliminary training, section 3.3.1

    def preliminary(self, server: Server, t: int) -> None:
        """Train encoder, classifier and decoder; average the first two, and after the last such round the decoders."""
        state, last, every = server.state, t + 1 == self.preliminary_rounds, self.decoder_sync == "every"
        message = Preliminary(state.weights, state.decoder if every else None, last or every)
        beside = {"decoder": part(server.initial, "decoder")}
        replies, mean = self.gather(server, self.cohort(server, t), self.preliminary_client, message, beside=beside)
        state.weights = mean["weights"]
        if message.upload_decoder:
            if "decoder" not in mean:
                raise FedfillError("feddpms: no client sent its decoder, so there is none to synthesise with")
            state.decoder = mean["decoder"]
        if last and self.share_at == "preliminary_end" and self.mechanism != "none":
            self = self.agree(server)
            ask = Secondary(state.weights, state.decoder, [], share=True, settled=False, agreed=state.agreed)
            self.collect(server, server.call(list(replies), self.share_client, ask))

    @client_handler
    def preliminary_client(self, client: Client, message: Preliminary) -> PreliminaryReply:
        """Train the whole VAE; the decoder stays here until the last preliminary round."""
        state = client.state
        decoder = message.decoder or state.local_decoder or part(client.initial, "decoder")
        done = self.contribute(client, message, self.vae_loss, beside=decoder)
        state.local_decoder = None if message.upload_decoder else done.beside
        if self.share_at == "preliminary_end" and client.round + 1 == self.preliminary_rounds:
            state.local_weights = done.trained
        return done.reply(PreliminaryReply, decoder=done.beside if message.upload_decoder else None)

    # Secondary training, algorithm 2

    def secondary(self, server: Server, t: int) -> None:
        """Matching, synthesis, training on the augmented sets, DPMS, and the average by augmented size."""
        state, cohort = server.state, self.cohort(server, t)
        seekers = [i for i in cohort if i not in state.benefited]
        if self.means == "global":
            state.means = state.means or self.sum_codes(server)
            sources = {i: [state.means] for i in seekers}
        else:
            sources = {i: [state.shared[j] for j in found] for i, found in self.matching(server, seekers).items()}
        messages = {i: self.secondary_message(server, i, sources.get(i, [])) for i in cohort}
        replies, mean = self.gather(server, cohort, self.secondary_client, messages)
        self.collect(server, replies)
        state.weights = mean.get("weights", state.weights)

    def secondary_message(self, server: Server, i: int, sources: list[Shared]) -> Secondary:
        """What client i needs (lines 4 and 15)."""
        state, filters = server.state, self.filters_at_home
        shared, benefited = i in state.shared or self.means == "global", i in state.benefited
        # who filters at home keeps w_d until it is told that both have arrived: a lost reply can't part what the two believe
        decodes = bool(sources) or (filters and not shared)
        holds = filters and (shared or benefited) if self.means == "local" else i in state.holders.clients
        return Secondary(
            state.weights, state.decoder if decodes and not holds else None, sources,
            share=self.mechanism != "none" and not shared, settled=shared and benefited, agreed=state.agreed,
        )  # fmt: skip

    def matching(self, server: Server, seekers: Sequence[int]) -> dict[int, list[int]]:
        """The assistants of the seekers among A (supplement, algorithm 1)."""
        shared = server.state.shared
        return self.matched(server, seekers, {j: s.offered(self.mechanism == "prior") for j, s in shared.items()})

    def sum_codes(self, server: Server) -> Shared:
        """With means=global: one sum of codes by the global encoder, and the mean of each class that stands out of the noise."""
        latent = latent_size(server.model(self.global_weights(server)), server.sample)
        statistic = self.code_moments(latent, server.classes)
        ask = Ask(changed(server, part(server.state.weights, "encoder")), server.clients)
        found = collect(server, self.code_sums, ask, statistic, self.code_noise(statistic), purpose="codes")
        warn_of_absent(server, sound_counts(found), found.stds["counts"], "it has no mean to draw from")
        shared = self.share_all(found.sums["moments"], sound_counts(found))
        return replace(shared, codes=shared.codes.to(server.sample.labels.device))  # sums are joined on the CPU

    @client_handler
    def code_sums(self, client: Client, message: Ask) -> Sums:
        """Sums of the client's bounded codes by class."""
        model = client.model({**client.initial, **message.weights})
        statistic = self.code_moments(latent_size(model, client.data), client.classes)
        codes = self.bounded_codes(model, client.data, client.check)
        return contribute(client, statistic, codes, self.code_noise(statistic), message.clients, purpose="codes")

    @client_handler
    def secondary_client(self, client: Client, message: Secondary) -> SecondaryReply:
        """Lines 2 to 20, on client i."""
        self, state = self.agreed(message.agreed), client.state
        # preliminary training is over, also for clients that missed its last round
        state.local_decoder = state.local_weights = None
        if message.decoder is not None or message.settled:
            state.decoder = message.decoder
        made: list[list[int]] = []
        if message.sources:
            model = client.model({**message.weights, **state.decoder})
            own = self.scarce(client) if self.only_scarce or self.means == "global" else range(client.classes)
            sources = [source.only(own) for source in message.sources]
            images, made = self.synthesise(model, sources, client.stream("synthesis"), client.check)
            state.synthetic = images if len(images) else state.synthetic
        data = client.data + state.synthetic
        done = self.contribute(client, message, self.loss, data=data, samples_per_epoch=len(client.data))
        shared, tried = self.dpms(client, message.weights, done.trained) if message.share else (None, [])
        if not message.share:  # without a request for H_i it is the rows that tell it
            client.release("acceptance", Scarce.declared["classes"] if self.means == "global" else FOLLOWS)
        benefited, acceptance = state.synthetic is not None, [*made, *tried]
        if self.means == "global" and message.sources:  # with a better judge it decodes again, until nothing is missing
            benefited = all(accepted >= self.quota for _, accepted, _ in made)
        return done.reply(SecondaryReply, benefited=benefited, shared=shared, acceptance=acceptance)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """l1 alone: the cross-entropy of the secondary phase."""
        if self.secondary_latent == "mean":
            return super().loss(model, batch, context)
        return nn.functional.cross_entropy(model.sampled_scores(batch.inputs), batch.labels)  # type: ignore[operator]

    @client_handler
    def share_client(self, client: Client, message: Secondary) -> SecondaryReply:
        """DPMS at the end of preliminary training, with the local model of that round."""
        client.state.decoder = message.decoder
        shared, tried = self.agreed(message.agreed).dpms(client, message.weights, client.state.local_weights)
        client.state.local_weights = None
        return SecondaryReply(None, 0, False, shared, tried)

    def dpms(self, client: Client, received: Weights, local: Weights) -> tuple[Shared | None, list[list[int]]]:
        """Noisy latent means of the n most abundant classes, by the received or the local encoder; rows of the filter."""
        data, counts = client.data, client.data.counts(client.classes)
        classes = self.abundant(counts)
        model = client.model({**local, **part(received if self.encoder == "global" else local, "encoder")})
        latent = latent_size(model, data)
        if self.mechanism == "prior":
            shared, tried, releases = self.share_names(classes, latent, data)
        else:
            means = class_means(model, data, classes, self.bound, self.clip(latent))  # [n, l]
            own = received if self.mechanism == "public_filter" else local
            judge = client.model({**own, **client.state.decoder}) if self.filters_at_home else None
            # the paper's mechanism with its filter has no guarantee, and keeps its draws
            plain = self.mechanism == "paper" and self.keep != "all"
            noise = client.unguaranteed("dpms") if plain else client.noise("dpms")
            shared, tried, releases = self.share(means, classes, counts, judge, noise, client.check)
        for name, release in releases.items():
            client.release(name, release)
        return shared, tried

    def collect(self, server: Server, replies: Mapping[int, SecondaryReply]) -> None:
        """Extend A, B, C and Z by what arrived and makes sense, and record how the filter did."""
        state, model = server.state, server.model(self.global_weights(server))
        task = server.classes, server.clients, latent_size(model, server.sample)
        flaws = {i: self.flaw(reply.shared, reply.acceptance, *task) for i, reply in replies.items()}
        for i, flaw in flaws.items():
            if flaw is not None:
                server.lose(i, "DPMS", flaw)
        sound = {i: reply for i, reply in replies.items() if flaws[i] is None}
        state.shared = {**state.shared, **{i: reply.shared for i, reply in sound.items() if reply.shared is not None}}
        state.benefited = sorted({*state.benefited, *(i for i, reply in sound.items() if reply.benefited)})
        state.holders = state.holders.acknowledged(sound)
        notes, warning = self.report({i: reply.acceptance for i, reply in sound.items()})
        server.note(**notes)
        if warning is not None:
            server.warn(warning)

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Images of everything that was shared, as a recipient would make them; codes filtered at home are a fixed set."""
        shared = [*server.state.shared.values(), *filter(None, [server.state.means])]
        if not shared:
            return None
        model = server.model({**server.state.weights, **server.state.decoder})
        return self.decoded(model, shared, server.stream("samples"), per_class)
