"""FedDPMS's mechanism: noisy means of latent codes, a filter, and images decoded from what it accepts.

Chen and Vikalo, "Federated Learning in Non-IID Settings Aided by Differentially Private Synthetic Data", CVPRW 2023,
section 3.3.2, equations 1 and 2; the variants beside ``paper`` are ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from fedfill.data.samples import Samples, some_of_each
from fedfill.errors import FedfillError
from fedfill.privacy.keyed import KeyedStream, normal
from fedfill.privacy.releases import Declared, Release, gaussian, public, unbounded
from fedfill.privacy.sensitivity import mean_sensitivity
from fedfill.statistics.sums import Statistic
from fedfill.synthesis.dose import Dose
from fedfill.synthesis.global_means import GlobalMeans, bounded_codes, code_moments, means_of
from fedfill.synthesis.vae import Bound, accepted_codes, decode, latent_size

FOLLOWS = public("follows from what the server holds")
NOTHING = public("holds nothing of the client's data")


@dataclass(frozen=True)
class Shared(Declared):
    """What one assisting client shares: C_i and Z_i.

    Attributes:
        classes: The client's n most abundant classes.
        counts: Codes of each class.
        codes: ``[sum(counts), l]`` float32, class after class.
    """

    declared: ClassVar = {"classes": unbounded("the n most abundant classes, exact")}

    classes: list[int]
    counts: list[int]
    codes: Tensor

    def offered(self, empty: bool = False) -> list[int]:
        """The classes of which there are codes, or all of them: without codes a class helps nobody, unless it has a prior."""
        return [c for c, k in zip(self.classes, self.counts, strict=True) if k or empty]

    def by_class(self) -> list[tuple[int, Tensor]]:
        """Each class with its codes, ``[count, l]``."""
        return list(zip(self.classes, torch.split(self.codes, self.counts), strict=True))

    def only(self, wanted: Collection[int]) -> Shared:
        """The part of some classes."""
        kept = [(c, own) for c, own in self.by_class() if c in wanted]
        codes = torch.cat([self.codes[:0], *(own for _, own in kept)])
        return Shared([c for c, _ in kept], [len(own) for _, own in kept], codes)

    def flaw(self, classes: int, latent: int, most: int) -> str | None:
        """Why it makes no sense: others would decode it, and take their labels from it.

        Args:
            classes: Of the task.
            latent: Size l of a code.
            most: Codes of a class, at the most.

        Returns:
            A few words, or None.
        """
        if (
            len(self.classes) != len(self.counts)
            or len(set(self.classes)) != len(self.classes)
            or not all(0 <= c < classes for c in self.classes)
            or not all(0 <= k <= most for k in self.counts)
        ):
            return "'classes' and 'counts' are no classes with their numbers of codes"
        codes, n = self.codes, sum(self.counts)
        if codes.dtype != torch.float32 or codes.shape != (n, latent):
            return f"'codes' is {codes.dtype} of shape {list(codes.shape)}, not [{n}, {latent}]"
        return None


class NoisyMeans(GlobalMeans, Dose):
    """How means are bounded, made noisy, filtered and accounted for: settings of an algorithm that shares them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    sigma: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise on each coordinate of a code; with noise=sensitivity a multiple of the sensitivity."""
    noise: Literal["absolute", "sensitivity"] = "absolute"
    """Whether sigma is the standard deviation itself (equation 1) or a multiple of the mean's l2 sensitivity (definition 2)."""
    latent_bound: Bound | Literal["auto"] = "auto"
    """How codes are bounded before the mean: to [0, 1] (sigmoid), by clipping their norm (clip), or not at all (none); auto: sigmoid where the network has one, else clip."""
    latent_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Norm to which latent_bound=clip clips a code; none: half the root of the latent's size, as far as a sigmoid's codes lie from their centre."""
    mechanism: Literal["paper", "public_filter", "single_release", "prior", "none"] = "paper"
    """What is shared: filtered noisy copies (paper), all judged by the public global model (public_filter), one noisy mean a class (single_release), class names alone, whose codes are drawn from a prior (prior), or nothing (none)."""
    centre: Literal["mean", "prior", "wrong"] = Field(default="mean", exclude_if=lambda value: value == "mean")
    """Around what codes of a class are drawn, all else left as the mechanism has it: its mean (mean), the centre of a prior (prior), or the mean of another shared class (wrong); the last two are controls."""
    keep: Literal["recognised", "all"] = Field(default="recognised", exclude_if=lambda value: value == "recognised")
    """Which codes are kept: those whose image the judge recognises (recognised, the paper's equation 2), or all that are drawn, alpha for each class (all)."""
    release_sigma: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Noise on the one mean of single_release, at most sigma; recipients add the rest."""
    max_candidates: int | None = Field(default=None, ge=1)
    """Draws for each class at the most, and exactly with public_filter; none: 200 times alpha."""

    @property
    def candidates(self) -> int:
        """`max_candidates` once it is resolved."""
        return self.max_candidates or 200 * self.quota

    @property
    def filters_at_home(self) -> bool:
        """Whether the assistant judges its codes through the decoder before it shares them."""
        return self.mechanism in ("paper", "public_filter")

    @property
    def bound(self) -> Bound:
        """`latent_bound` once it is resolved."""
        return "none" if self.latent_bound == "auto" else self.latent_bound

    def clip(self, latent: int) -> float:
        """Norm to which codes of size `latent` are clipped."""
        return self.latent_clip or math.sqrt(latent) / 2

    def sensitivity(self, latent: int, count: int) -> float:
        """How far one record can move the mean of `count` codes of size `latent`, in l2; infinite without a bound."""
        return mean_sensitivity(latent, count, self.bound, self.clip(latent))

    def mechanism_resolved(self, model: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """The settings that depend on the network and on each other.

        Args:
            model: With an ``encoder``.
            inputs: Of one sample as they are stored, ``[1, ...]``.

        Returns:
            New values by name.

        Raises:
            FedfillError: Where settings don't fit together.
        """
        if self.means == "global" and "mechanism" not in self.model_fields_set:
            # one noisy mean of each class, and recipients do the rest
            chosen = self.model_copy(update={"mechanism": "single_release"})
            return {"mechanism": chosen.mechanism, **chosen.mechanism_resolved(model, inputs)}
        activation = getattr(model.encoder, "activation", None)
        latent = latent_size(copy.deepcopy(model).eval(), Samples(inputs, torch.zeros(1)))
        bound = self.latent_bound
        if bound == "auto":
            bound = "sigmoid" if isinstance(activation, nn.Sigmoid) else "clip"
        if bound == "sigmoid" and isinstance(activation, nn.ReLU | nn.Identity):
            raise FedfillError("latent_bound: found 'sigmoid' on a network without one; allowed: auto, clip, none")
        if self.latent_clip is not None and bound != "clip":
            raise FedfillError(
                f"latent_clip: found {self.latent_clip:g} with latent_bound={bound}, which clips nothing; allowed: none"
            )
        if self.noise == "sensitivity" and bound == "none":
            raise FedfillError("noise: found 'sensitivity' with latent_bound=none, which has none; allowed: absolute")
        if self.noise == "sensitivity" and not self.filters_at_home:
            raise FedfillError(f"noise: found 'sensitivity' with mechanism={self.mechanism}; allowed: absolute")
        self.check_sums(bound)
        self._check_centre()
        if self.mechanism == "single_release" and self.means == "local" and self.release_sigma > self.sigma:
            raise FedfillError(
                f"release_sigma: found {self.release_sigma}; allowed: at most sigma, which is {self.sigma}"
            )
        return {
            "latent_bound": bound,
            "latent_clip": self.clip(latent) if bound == "clip" else self.latent_clip,
            "max_candidates": self.max_candidates if self.alpha == "auto" else self.candidates,
        }

    def _check_centre(self) -> None:
        if self.means == "global" and self.mechanism != "single_release":
            raise FedfillError(
                f"means: found global with mechanism={self.mechanism}; allowed with mechanism=single_release, which it is where none is set"
            )
        judged = ("paper", "public_filter")
        if self.centre == "wrong" and self.n_classes == 1 and self.means == "local":
            raise FedfillError(
                "centre: found wrong with n_classes=1, where a client has no other class; allowed: n_classes=2"
            )
        if self.keep == "all" and self.mechanism in ("public_filter", "none"):
            raise FedfillError(
                f"keep: found all with mechanism={self.mechanism}; allowed with mechanism=paper, single_release or prior"
            )
        allowed = {"mean": None, "prior": judged, "wrong": (*judged, "single_release")}[self.centre]
        if allowed is not None and self.mechanism not in allowed:
            raise FedfillError(
                f"centre: found {self.centre} with mechanism={self.mechanism}; allowed with mechanism={', '.join(allowed)}"
            )
        if self.centre == "prior" and self.noise == "sensitivity":
            raise FedfillError(
                "centre: found prior with noise=sensitivity, and a prior has none; allowed: noise=absolute"
            )

    # What an assisting client does

    def share(
        self, means: Tensor, classes: Sequence[int], counts: Sequence[int], judge: nn.Module | None,
        generator: torch.Generator | KeyedStream, check: Callable[[], None],
    ) -> tuple[Shared | None, list[list[int]], dict[str, Release]]:  # fmt: skip
        """Noisy copies of class means, filtered where they are filtered at home.

        Args:
            means: Of bounded codes, ``[n, l]``.
            classes: Whose they are, the most abundant first.
            counts: The client's samples of every class of the task.
            judge: Holds decoder, encoder and classifier; None with ``single_release``.
            generator: Stream of the noise.
            check: Called again and again; what it raises ends the work.

        Returns:
            What is shared, None where no code was accepted; rows [class, accepted, drawn]; and what each field releases.
        """
        if self.centre == "wrong" and len(classes) < 2:  # there is no other class; that it shares nothing tells so
            return None, [], {"shared.classes": Shared.declared["classes"], "acceptance": NOTHING}
        sensitivity = [self.sensitivity(means.shape[1], counts[c]) for c in classes]
        unit = [1.0 if self.noise == "absolute" else s for s in sensitivity]
        means, unit = self.centres(means), unit[-1:] + unit[:-1] if self.centre == "wrong" else unit
        codes: list[Tensor] = []
        rows: list[list[int]] = []
        for mean, c, scale in zip(means, classes, unit, strict=True):
            if judge is None:
                own = (mean + self.release_sigma * normal(generator, mean.shape, mean.device))[None]
            else:
                own, drawn = self.kept_codes(judge, mean, self.sigma * scale, c, generator, check)
                rows.append([c, len(own), drawn])
            codes.append(own)
        # one record is in one class, so the classes compose in parallel, and the rarest, of the largest sensitivity, counts
        std = (self.release_sigma if judge is None else self.sigma) * (
            1.0 if self.noise == "absolute" else sensitivity[-1]
        )
        releases = self.released(0.0 if self.centre == "prior" else sensitivity[-1], std)
        if not any(len(own) for own in codes):
            # that none was accepted tells as much as sending the candidates, and the rows are those of C_i
            return None, rows, {**releases, "shared.classes": Shared.declared["classes"]}
        return Shared(list(classes), [len(own) for own in codes], torch.cat(codes)), rows, releases

    def kept_codes(
        self, judge: nn.Module, centre: Tensor, std: float, label: int, generator: torch.Generator | KeyedStream,
        check: Callable[[], None],
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Codes around a centre, as `accepted_codes`, or simply the first that are drawn."""
        if self.keep == "all":
            noise = normal(generator, (self.quota, len(centre)), centre.device)
            return centre + std * noise, self.quota
        return accepted_codes(
            judge, centre, std, label, quota=self.quota, candidates=self.candidates,
            exhaust=self.mechanism == "public_filter", generator=generator, check=check,
        )  # fmt: skip

    def centres(self, means: Tensor) -> Tensor:
        """Around what codes are drawn, ``[n, l]``, from the means of the classes; with ``wrong`` those of the classes before."""
        if self.centre == "wrong":
            return means.roll(1, 0)
        return torch.full_like(means, self.prior_centre) if self.centre == "prior" else means

    def share_names(
        self, classes: list[int], latent: int, data: Samples
    ) -> tuple[Shared | None, list[list[int]], dict[str, Release]]:
        """With ``prior``, as `share`: the classes alone, whose codes recipients draw, and no rows."""
        empty = data.inputs.new_empty(0, latent, dtype=torch.float32)
        nothing = dict.fromkeys(("shared.counts", "shared.codes", "acceptance"), NOTHING)
        return Shared(classes, [0] * len(classes), empty), [], nothing

    def released(self, sensitivity: float, std: float) -> dict[str, Release]:
        """What the fields of a reply release, by the sensitivity of the rarest class and the noise on its mean."""
        judged = self.keep == "recognised"
        copies = {"paper": self.quota, "public_filter": self.candidates, "single_release": 1}[self.mechanism]
        conditions = ["the encoder counts as fixed, although it was trained on the same records"]
        if self.mechanism == "paper" and judged:
            conditions.append(
                "the choice of copies counts as public, although a classifier trained on the same records made it"
            )
        if self.noise == "sensitivity":
            conditions.append("class sizes count as public, although the scale of the noise tells them")
        words = f"std {std:g}" if self.noise == "absolute" else f"std {std / sensitivity:g} times the sensitivity"
        met = self.mechanism != "paper" or not judged
        accepted = FOLLOWS if met else unbounded("what the local classifier accepted")
        what = "the centre of a prior" if self.centre == "prior" else "class means of latent codes"
        codes = gaussian(what, sensitivity, std, copies, conditions, met=met, noise=words)
        return {"shared.codes": codes, "shared.counts": accepted, "acceptance": accepted}

    # The means of all clients' records

    def code_moments(self, latent: int, classes: int) -> Statistic:
        """With ``means=global``: sums of bounded codes of size `latent` by class, and counts."""
        return code_moments(latent, classes, self.bound, self.clip(latent))

    def bounded_codes(
        self, model: nn.Module, data: Samples, check: Callable[[], None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What is summed: chunks of codes and labels, one code for each record."""
        return bounded_codes(model, data, self.bound, self.clip, check)

    def share_all(self, moments: Tensor, counts: Tensor) -> Shared:
        """The mean code of each class that somebody holds, of `moments` ``[l, classes]`` and `counts` ``[classes]``."""
        classes, means = means_of(moments, counts, self.bound, self.clip(len(moments)))
        return Shared(classes, [1] * len(classes), self.centres(means))

    # What a recipient does

    def synthesise(
        self, model: nn.Module, sources: Sequence[Shared], generator: torch.Generator,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Samples, list[list[int]]]:  # fmt: skip
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
        codes, labels, rows = [], [], []
        for label, own in (pair for source in sources for pair in source.by_class()):
            if not self.filters_at_home:
                centre = own[0] if len(own) else own.new_full((own.shape[1],), self.prior_centre)
                own, drawn = self.kept_codes(model, centre, self.public_std, label, generator, check)
                rows.append([label, len(own), drawn])
            codes.append(own)
            labels += [label] * len(own)
        images = decode(model, torch.cat([sources[0].codes[:0], *codes]))
        return Samples(images, torch.tensor(labels, dtype=torch.int64, device=images.device)), rows

    def decoded(
        self, model: nn.Module, sources: Sequence[Shared], generator: torch.Generator, per_class: int | None
    ) -> Samples:
        """What `synthesise` makes of all sources, or of each class no more than `per_class`, each code likely alike."""
        if per_class is None:
            return self.synthesise(model, sources, generator)[0]
        most = {"alpha": per_class, "max_candidates": math.ceil(self.candidates * per_class / self.quota)}
        made, _ = self.model_copy(update=most).synthesise(model, sources, generator)
        return some_of_each(made, per_class, generator)

    @property
    def prior_centre(self) -> float:
        """Every coordinate of the prior's mean: 1/2 where the codes are bounded to [0, 1], else 0."""
        return 0.5 if self.latent_bound == "sigmoid" else 0.0

    @property
    def public_std(self) -> float:
        """The noise that a recipient adds, so that a code's total noise has standard deviation sigma."""
        own = self.mechanism == "single_release" and self.means == "local"
        return math.sqrt(self.sigma**2 - self.release_sigma**2) if own else self.sigma

    # What is told of the filter

    def flaw(
        self, shared: Shared | None, rows: Sequence[Sequence[int]], classes: int, clients: int, latent: int
    ) -> str | None:
        """Why what a client shares, or its rows, make no sense; None where they do."""
        most = self.candidates
        sound = (len(row) == 3 and 0 <= row[0] < classes and 0 <= row[1] <= row[2] <= most for row in rows)
        if len(rows) > clients * classes or not all(sound):
            return "'acceptance' holds what is no [class, accepted, drawn]"
        return None if shared is None else shared.flaw(classes, latent, most)

    def report(self, tried: Mapping[int, Sequence[Sequence[int]]]) -> tuple[dict[str, Any], str | None]:
        """How the filters did.

        Args:
            tried: Rows [class, accepted, drawn] by client.

        Returns:
            Figures for the round's record, and a sentence for the user where codes are missing.
        """
        record: dict[str, Any] = {}
        for i, rows in tried.items():
            for c, accepted, drawn in rows:
                row = record.setdefault(str(i), {}).setdefault(str(c), {"accepted": 0, "drawn": 0})
                row["accepted"] += accepted
                row["drawn"] += drawn
        flat = [(i, c, accepted) for i, rows in tried.items() for c, accepted, _ in rows]
        short = [(i, c) for i, c, accepted in flat if accepted < self.quota]
        notes = {"acceptance": record} if record else {}
        if not short:
            return notes, None
        never = sorted({c for _, c, _ in flat} - {c for _, c, accepted in flat if accepted})
        return notes, (
            f"the filter accepted fewer than alpha={self.quota} codes for {len(short)} of {len(flat)} shared classes "
            f"(client {short[0][0]}, class {short[0][1]} among them)"
            + (f", and none at all of class {', '.join(map(str, never))}" if never else "")
            + "; a young decoder emits nearly the same image for every code: more preliminary_rounds or local_epochs, or "
            "a smaller sigma, may help"
        )
