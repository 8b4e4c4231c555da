"""Audits: the account of privacy attacked, a lower bound beside what the ledger claims.

The attacks run the algorithm's own code: a real run is watched through `fedfill.engines.audited`, and then its releases are made
again and again from neighbouring data, or canaries are put among records or clients. What is found is a lower bound with a stated
confidence. It is no evidence of privacy where it is small.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import torch

from fedfill import __version__
from fedfill.algorithms import Algorithm, find
from fedfill.data.partitions import Partition
from fedfill.data.samples import Samples
from fedfill.engines.audited import AuditedEngine
from fedfill.engines.local import choose_device
from fedfill.errors import FedfillError, Kept, did_you_mean, path_of, shown
from fedfill.experiment.loop import execute, make_engine, synthetic_images
from fedfill.experiment.own import Network
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.summary import Result
from fedfill.options import Options
from fedfill.privacy.audit import Finding
from fedfill.runs.directory import RunDirectory, to_json, write_atomically, writing
from fedfill.studies.assess import one_thread
from fedfill.studies.auditing.attacks import Budget, clients_attacked, gradients_attacked, releases_attacked
from fedfill.studies.auditing.bare import told
from fedfill.studies.auditing.replays import Transcript
from fedfill.studies.run import reopen

SUBJECT = "a run directory, what fedfill.run returned, or an algorithm"
Level = Literal["auto", "record", "client"]

QUICK: dict[str, Any] = {
    "gan_iterations": 20, "gan_chunk": 20, "gan_width": 4, "gan_latent": 8, "generator_steps": 1,
    "local_epochs": 1, "decoder_epochs": 1, "classifier_epochs": 1,
}  # fmt: skip
"""Of an algorithm that is audited by its name, where nothing else is given: a few steps, as each is a release like the others."""


FEATURES = "project(24) > unit"
"""Likewise: a claim on sums is the same for any number of features."""


@dataclass(frozen=True)
class Audit:
    """What `audit` found.

    Attributes:
        path: Where ``audit.json`` was written; None: nowhere.
        findings: One for each claim that was attacked.
        document: As in ``audit.json``.
    """

    path: Path | None
    findings: tuple[Finding, ...]
    document: dict[str, Any]

    def __repr__(self) -> str:
        """What was found of each claim."""
        told = "; ".join(f"{one.released}: {one.verdict}" for one in self.findings) or "no claim to attack"
        return f"<Audit: {told}{'' if self.path is None else f', in {self.path}'}>"

    @property
    def failed(self) -> bool:
        """Whether a claim of the ledger is refuted."""
        return any(finding.verdict == "FAIL" for finding in self.findings)


def audit(
    subject: str | Path | Kept | type[Algorithm],
    *,
    canaries: int = 1000,
    repeats: int = 4000,
    level: Level = "auto",
    confidence: float = 0.95,
    data: Any = None,
    partition: Partition | None = None,
    model: Network | None = None,
    out: str | Path | None = None,
    **options: Unpack[Options],
) -> Audit:
    """Attack what the ledger claims of a run, or of an algorithm.

    Example::

        found = fedfill.audit("fed3r", target_epsilon=3.0)
        found.failed, [(one.released, one.ledger_epsilon, one.found_epsilon) for one in found.findings]

    Args:
        subject: A run directory, or what `fedfill.run` returned, whose experiment is run again with canaries; or an algorithm, as in `fedfill.run`, which runs for
            two rounds on the bundled digits unless told otherwise.
        canaries: In one run, 20 or more: records with DP-SGD, clients with ``dpfedavg``.
        repeats: Of each release with Gaussian noise, with and without a canary, 200 or more.
        level: What a canary is: a record, a client, or what the algorithm protects (auto).
        confidence: Of the bounds, in (0, 1).
        data: As in `fedfill.run`; of a run directory again what came from Python.
        partition: Likewise.
        model: Likewise.
        out: Folder of ``audit.json``; None: the run directory, and of an algorithm none.
        **options: As in `fedfill.run`; of a run directory ``data_dir`` and ``device`` alone.

    Returns:
        The findings. The models of the runs that are made for it are thrown away: canaries have spoilt them.

    Raises:
        FedfillError: Where anything that was given is not allowed.
    """
    began = time.perf_counter()
    _check(canaries, repeats, level, confidence)
    folder = None if out is None else path_of("out", out)
    place = None if isinstance(subject, type) else path_of("audit", subject, SUBJECT)
    if place is not None and not (place / "experiment.toml").exists():
        if isinstance(subject, os.PathLike):
            raise FedfillError(f"audit: {place} holds no run (there is no experiment.toml)")
        place = None
    prepared = _prepared(subject, place, data, partition, model, dict(options))
    experiment = prepared.experiment
    if experiment.engine != "local":
        raise FedfillError(
            f"engine: found {experiment.engine}; allowed in an audit: local, as live data are never audited"
        )
    if experiment.test_fraction == 0:
        raise FedfillError(
            "test_fraction: found 0; allowed in an audit: none, or more than 0, as it looks for what tells training samples from others"
        )
    budget = Budget(canaries, repeats, 1 - confidence, experiment.delta, experiment.seed)
    private = bool(getattr(getattr(prepared.algorithm, "aggregation_of", None), "private", False))
    if level == "client" and not private:
        raise FedfillError(
            f"level: found client with {experiment.algorithm}, which protects no client as a whole; allowed: record, auto"
        )
    folder = place if folder is None else folder
    if folder is not None:
        with writing(folder):  # before the attacks, which take long
            folder.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    bare: dict[str, Any] = {}
    if private and level != "record":
        findings += clients_attacked(prepared, budget, _run)
    else:
        worst = max(range(len(prepared.federation.clients)), key=lambda i: len(prepared.federation.clients[i].train))
        transcript = Transcript(range(len(prepared.federation.clients)))
        result, made = _watched(prepared, transcript)
        findings += gradients_attacked(prepared, transcript, worst, budget, _run)
        with one_thread():
            findings += releases_attacked(prepared, transcript, worst, budget)
            bare = told(prepared, transcript, worst, result.weights, made)
    document = {
        "version": __version__, "algorithm": experiment.algorithm, "data": experiment.data, "seed": experiment.seed,
        "delta": experiment.delta, "confidence": confidence, "findings": [finding.document() for finding in findings],
        "without_guarantee": bare, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    if folder is not None:
        with writing(folder):
            write_atomically(folder / "audit.json", to_json(document))
    return Audit(None if folder is None else folder / "audit.json", tuple(findings), document)


def _check(canaries: int, repeats: int, level: str, confidence: float) -> None:
    for name, value, least in (("canaries", canaries, 20), ("repeats", repeats, 200)):
        if type(value) is not int or value < least:
            raise FedfillError(f"{name}: found {value!r}; allowed: a whole number of at least {least}")
    if level not in get_args(Level):
        raise FedfillError(f"level: found '{level}'; {did_you_mean(str(level), get_args(Level))}")
    if isinstance(confidence, bool) or not isinstance(confidence, Real) or not 0 < confidence < 1:
        raise FedfillError(f"confidence: found {shown(confidence)}; allowed: a number above 0 and below 1")


def _prepared(
    subject: Any, place: Path | None, data: Any, partition: Any, model: Any, options: dict[str, Any]
) -> Prepared:
    if place is not None:
        given = {"data": data, "partition": partition, "model": model, **options}
        return reopen(RunDirectory(place), setting="audit", **given)
    kind = find(subject) if isinstance(subject, str) else subject
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise FedfillError(f"audit: found {shown(subject)}; allowed: {SUBJECT}")
    quick = {name: value for name, value in QUICK.items() if name in kind.model_fields and name not in options}
    if getattr(kind, "network", None) == "features":
        quick.setdefault("features", FEATURES)
    return arrange(
        subject, data="digits" if data is None else data, partition="dirichlet:0.5" if partition is None else partition,
        model="auto" if model is None else model, **{"rounds": 2, **quick, **options},
    )  # fmt: skip


def _run(prepared: Prepared, engine_of: Prepared, watch: Any, canaries: Any) -> Result:
    """A run in a folder that goes away, on the engine of `engine_of`, which may have fewer clients."""
    with tempfile.TemporaryDirectory(prefix="fedfill-audit-") as folder:
        return execute(replace(prepared), Path(folder) / "run", None, _connect(engine_of, watch, canaries))


def _watched(prepared: Prepared, watch: Transcript) -> tuple[Result, Samples | None]:
    """Likewise, and the synthetic samples that the server can make in the end, where nothing protects them."""
    with tempfile.TemporaryDirectory(prefix="fedfill-audit-") as folder:
        result = execute(replace(prepared), Path(folder) / "run", None, _connect(prepared, watch, None))
        sampled = any(release.sampled for declared in watch.releases for release in declared.values())
        if sampled or type(prepared.algorithm).synthetic is Algorithm.synthetic:
            return result, None
        device = choose_device(prepared.experiment.device)
        made = synthetic_images(prepared, RunDirectory(result.directory), device)
    return result, made


def _connect(engine_of: Prepared, watch: Any, canaries: Any) -> Callable[[Prepared, torch.device], AuditedEngine]:
    def connect(whole: Prepared, device: torch.device) -> AuditedEngine:
        real, everyone = len(engine_of.federation.clients), len(whole.federation.clients)
        return AuditedEngine(make_engine(engine_of, device), real, everyone, watch, canaries)

    return connect
