"""What the fields of all replies are declared to give away, in one table: a field that is declared anew has to be written here too."""

from __future__ import annotations

from typing import Any

import pytest

from fedfill.algorithms import known_algorithms
from fedfill.engines.flower_messages import handlers_of
from fedfill.privacy.releases import Release
from fedfill.protocol.messages import declarations

UNBOUNDED, INDEPENDENT, AT_RUN_TIME = "no guarantee", "independent of the client's data", "decided by the handler"

CONTRIBUTED = {"weights": UNBOUNDED, "samples": UNBOUNDED, "scale": UNBOUNDED, "control": UNBOUNDED}
TABLE: dict[str, dict[str, str]] = {
    "_messages.Update": CONTRIBUTED,
    "_layers.Kept": {},
    "central.Trained": {"weights": UNBOUNDED},
    "local.Turn": {},
    "feddpms.PreliminaryReply": {**CONTRIBUTED, "decoder": UNBOUNDED},
    "_matching.Scarce": {"classes": UNBOUNDED},
    "_matching.Skew": {"scarce": UNBOUNDED, "samples": UNBOUNDED},
    "feddpms.SecondaryReply": {
        **CONTRIBUTED, "benefited": INDEPENDENT, "shared.classes": UNBOUNDED, "shared.counts": AT_RUN_TIME,
        "shared.codes": AT_RUN_TIME, "acceptance": AT_RUN_TIME,
    },
    "fedda_cvae.OwnKnowledge": {"codes": UNBOUNDED, "classes": UNBOUNDED},
    "cox.CoxSums": {"sums": UNBOUNDED},
    "kaplanmeier.Tests": {"sums": UNBOUNDED},
    "feddg.SharedSpectra": {"amplitudes": UNBOUNDED},
    "fedproto.OwnPrototypes": dict.fromkeys(("means", "classes", "counts"), UNBOUNDED),
    "pfnm.OwnUnits": {"weights": UNBOUNDED, "counts": UNBOUNDED},
    "clusteredsampling.Size": {"samples": UNBOUNDED},
    "clusteredsampling.DrawnUpdate": {**CONTRIBUTED, "draws": INDEPENDENT},
    "ifca.ClusterUpdate": {**CONTRIBUTED, "cluster": UNBOUNDED},
    "fedmix.MixedUpdate": {**CONTRIBUTED, "below": UNBOUNDED},
    "naivemix.SharedMeans": {"means": UNBOUNDED},
    "fedzda.ZeroShotUpdate": {**CONTRIBUTED, "model": UNBOUNDED, "losses": INDEPENDENT},
    "fraug.SharedUpdate": {**CONTRIBUTED, "generator": UNBOUNDED},
    "fedcvae.Own": {"decoder": AT_RUN_TIME, "counts": AT_RUN_TIME},
    "fedpft.Mixtures": dict.fromkeys(("labels", "sizes", "means", "covariances"), UNBOUNDED),
    "fedgan.Own": dict.fromkeys(("generator", "critic", "samples"), UNBOUNDED),  # with noise the handler has the word
    "fedgen.CountedUpdate": {**CONTRIBUTED, "counts": UNBOUNDED, "head": UNBOUNDED},
    "sdafl.Pretrained": {"iterations": INDEPENDENT},
    "sdafl.Images": {"inputs": AT_RUN_TIME, "labels": UNBOUNDED},
    "sdafl.AidedUpdate": {**CONTRIBUTED, "model": UNBOUNDED},
    "sums.Sums": {"sums": AT_RUN_TIME},
    "semifl.Labelled": {"samples": UNBOUNDED, "unlabelled": UNBOUNDED},
    "semifl.Trained": CONTRIBUTED,
    "semifl.Statistics": {"statistics": UNBOUNDED, "samples": UNBOUNDED},
}  # fmt: skip
"""By message and field, for every reply of every algorithm."""

OURS = {name: kind for name, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")}


def replies(name: str) -> dict[str, Any]:
    kinds = {reply for _, reply in handlers_of(OURS[name]()).values()}
    return {f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}": kind for kind in kinds}


def declared(release: Release | None) -> str:
    if release is None:
        return AT_RUN_TIME
    if release.mu is None:
        # what noise would be worth under conditions is no matter of a class
        assert (release.conditional_mu, release.conditions, release.sampled) == (None, (), None)
        return UNBOUNDED
    assert (release.mu, release.sampled) == (0.0, None)
    return INDEPENDENT


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_field_is_declared_as_in_the_table(name: str) -> None:
    found = {
        message: {path: declared(release) for path, release in declarations(kind)}
        for message, kind in replies(name).items()
    }
    assert found == {message: TABLE[message] for message in found}


def test_no_declaration_is_of_a_field_that_is_none_and_the_table_has_no_message_too_many() -> None:
    kinds = {message: kind for name in OURS for message, kind in replies(name).items()}
    assert set(kinds) == set(TABLE)
    assert all(kind.declared.keys() <= set(TABLE[message]) for message, kind in kinds.items())
