"""Local objectives and aggregations as values: whom they compose with, and that composing adds nothing of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import TINY_GAN, refused, run_rounds, scripted, small_federation
from torch import Tensor

import fedfill
from fedfill.algorithms import Composable, Update, find, known_algorithms, parse_variant
from fedfill.algorithms._registry import registered
from fedfill.algorithms._values import able
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedprox import FedProx
from fedfill.algorithms.fedvae import FedVAE
from fedfill.errors import ContractError, FedfillError, checked
from fedfill.experiment.settings import Experiment
from fedfill.models.classifiers import Encoder
from fedfill.models.views import weights_of

DPMS = {"alpha": 5, "max_candidates": 50, "preliminary_rounds": 2, "local_epochs": 1, "batch_size": 8}
SGD = {"optimizer": "sgd", "learning_rate": 0.05}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("local", ["fedprox:mu=0.5", "moon:contrast=latent,mu=2", "moon:contrast=logits", "moon"])
def test_feddpms_with_a_local_objective_runs_both_phases_and_differs(local: str):
    same_network = {"projection": 256} if local == "moon" else {}
    plain = run_rounds(FedDPMS(**DPMS), rounds=4, participation=0.5, model=same_network)
    composed = run_rounds(FedDPMS(**DPMS, local=local), rounds=4, participation=0.5)
    assert composed.lost == []
    assert composed.state.weights.keys() == plain.state.weights.keys()
    assert any("acceptance" in record for record in composed.history)
    assert not same(composed.state.weights, plain.state.weights)


def test_feddpms_with_scaffold_keeps_control_variates_on_both_sides():
    server = run_rounds(FedDPMS(**{**DPMS, **SGD}, local="scaffold"), rounds=4)
    assert server.state.control is not None
    assert set(server.state.control) == {n for n in server.state.weights if "running" not in n}
    assert all(state["control"] is not None for state in server.client_states.values())
    assert all("local_decoder" in state for state in server.client_states.values())


@pytest.mark.parametrize(("aggregation", "equal"), [("fednova", True), ("qffl:q=0.5", False)])
def test_feddpms_with_an_aggregation(aggregation: str, equal: bool):
    """FedNova is FedAvg's mean where all clients make as many steps, as they do here."""
    settings = {**DPMS, **SGD}
    plain = run_rounds(FedDPMS(**settings), rounds=4, participation=0.5)
    composed = run_rounds(FedDPMS(**settings, aggregation=aggregation), rounds=4, participation=0.5)
    assert composed.lost == []
    assert same(composed.state.weights, plain.state.weights) is equal


def test_a_value_of_no_effect_has_none():
    """mu = 0 leaves every bit; q = 0 is the plain mean, which FedDPMS's is where all hold as many samples."""
    settings = {**DPMS, **SGD}
    plain = run_rounds(FedDPMS(**settings), rounds=3)
    assert same(run_rounds(FedDPMS(**settings, local="fedprox:mu=0"), rounds=3).state.weights, plain.state.weights)
    once = run_rounds(FedDPMS(**settings), rounds=2)
    mean = run_rounds(FedDPMS(**settings, aggregation="qffl:q=0"), rounds=2)
    assert all(torch.allclose(mean.state.weights[n], once.state.weights[n], atol=1e-4) for n in once.state.weights)


def test_fedavg_with_a_value_is_that_algorithm():
    settings = {"local_epochs": 1, "batch_size": 8}
    assert same(
        run_rounds(FedAvg(**settings, local="fedprox:mu=0.3"), rounds=2).state.weights,
        run_rounds(FedProx(**settings, mu=0.3), rounds=2).state.weights,
    )
    assert same(
        run_rounds(FedAvg(**settings, **SGD, aggregation="qffl:q=2"), rounds=2).state.weights,
        run_rounds(find("qffl")(**settings, **SGD, q=2), rounds=2).state.weights,
    )


class One(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("aggregation", "start", "replies", "expected"),
    [
        # 10 - (6 + 3) / (1 + 2)
        (
            "qffl",
            10.0,
            [Update({"w": torch.tensor([6.0])}, 1, scale=1.0), Update({"w": torch.tensor([3.0])}, 999, scale=2.0)],
            7.0,
        ),
        # 0 + (1 + 3) / 2
        (
            "dpfedavg:noise_multiplier=1e-9",
            0.0,
            [Update({"w": torch.tensor([1.0])}, 10), Update({"w": torch.tensor([3.0])}, 990)],
            2.0,
        ),
        # 2 / 10 of the one and 8 / 10 of the other
        (None, 0.0, [Update({"w": torch.tensor([1.0])}, 2), Update({"w": torch.tensor([6.0])}, 8)], 5.0),
    ],
)
def test_clients_weigh_as_the_aggregation_has_it_and_not_as_its_host(
    aggregation: str | None, start: float, replies: list[Update], expected: float
):
    server, engine = scripted(clients=2, weights={"w": torch.tensor([start])}, model=One())
    engine.script["train"] = lambda i, message, t: replies[i]
    FedAvg(aggregation=aggregation).round(server, 0)
    assert server.state.weights["w"].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", [FedMix, FedVAE])
def test_others_compose_too(kind: type):
    settings = {"local_epochs": 1, "batch_size": 8, **SGD}
    runs = [
        run_rounds(kind(**settings, **value), rounds=2)
        for value in (
            {},
            {"local": "fedprox:mu=1"},
            {"aggregation": "qffl"},
            {"local": "fedprox:mu=1", "aggregation": "qffl"},
        )
    ]
    assert all(run.lost == [] for run in runs)
    assert not any(same(a.state.weights, b.state.weights) for k, a in enumerate(runs) for b in runs[k + 1 :])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"local": "fedprx"}, "local: found 'fedprx'; did you mean 'fedprox'?"),
        (
            {"local": "feddyn"},
            "local: found feddyn, which has a local objective and a server's step that make sense together alone",
        ),
        ({"local": "fednova"}, "local: found fednova, which is one for aggregation=fednova; allowed: "),
        ({"local": "local"}, "local: found local, which has none of its own; allowed: "),
        ({"aggregation": "fedprox"}, "aggregation: found fedprox, which is one for local=fedprox; allowed: "),
        ({"local": "fedprox:mv=1"}, "local: fedprox takes no 'mv' here; allowed: mu"),
        ({"local": "fedprox:local_epochs=3"}, "local: fedprox takes no 'local_epochs' here"),
        ({"aggregation": "fednova:q=3"}, "aggregation: fednova takes no 'q' here; it has no settings"),
        ({"local": "fedprox:mu=-1"}, "mu: found '-1'; allowed: at least 0"),
        ({"local": "fedprox:mu"}, "algorithm: found 'mu' in 'fedprox:mu'"),
    ],
)
def test_slips(settings, sentence):
    with pytest.raises(FedfillError) as refusal:
        checked(FedDPMS, settings)
    assert sentence in str(refusal.value)


def test_scaffold_in_feddpms_needs_plain_gradient_steps():
    with refused("optimizer", "adam", "scaffold"):
        run_rounds(FedDPMS(**DPMS, local="scaffold"), rounds=1)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"local": find("fednova")()}, ("fednova", "aggregation")),
        ({"aggregation": find("scaffold")()}, ("scaffold", "local")),
        ({"aggregation": find("feddyn")()}, ("feddyn", "local objective")),
        ({"local": find("central")()}, ("central",)),
        ({"local": FedProx(mu=0.1, local_epochs=7)}, ("fedprox", "'local_epochs'")),
    ],
)
def test_instances_are_checked_like_words(settings, facts):
    with refused(next(iter(settings)), *facts):
        FedDPMS(**settings)
    assert FedDPMS(local=FedProx(mu=0.1)).local == checked(FedDPMS, {"local": "fedprox:mu=0.1"}).local


def test_two_settings_of_a_value_in_a_variant():
    name, settings = parse_variant("fedavg:local=moon:mu=3;contrast=logits,batch_size=8")
    algorithm = checked(find(name), settings)
    assert (algorithm.local.mu, algorithm.local.contrast, algorithm.batch_size) == (3.0, "logits", 8)


@pytest.mark.parametrize("name", ["fednova", "qffl"])
def test_scaffold_goes_with_the_plain_mean_alone(name: str):
    with refused("aggregation", f"{name} with scaffold"):
        run_rounds(find(name)(**SGD, local="scaffold"), rounds=1)


def test_weights_that_nobody_would_use_are_refused():
    with refused("weighting", "uniform", "aggregation", "fednova"):
        run_rounds(FedAvg(weighting="uniform", aggregation="fednova"), rounds=1)
    for name in ("qffl", "feddyn"):
        with refused("weighting", "samples", "uniform"):
            checked(find(name), {"weighting": "samples"})


def test_values_survive_the_settings_file():
    given = FedDPMS(local="moon:contrast=logits,mu=3", aggregation="qffl:q=0.25")
    document = given.model_dump()
    assert document["local"] == "moon:mu=3.0,temperature=0.5,contrast=logits"
    assert document["aggregation"] == "qffl:q=0.25"
    again = checked(FedDPMS, document)
    assert again == given
    assert checked(FedDPMS, {"local": "none", "aggregation": None}).local is None
    assert Experiment(algorithm="feddpms", settings=document).settings == document


OURS = [
    n
    for n, kind in known_algorithms().items()
    if kind.__module__.startswith("fedfill.") and not kind.network and not kind.tabular
]
"""Those that train a network, and not a last layer alone from sums."""
PLAIN = ("pfnm", "fedma")
"""Those that refuse batch norm."""


def quick(name: str) -> dict[str, Any]:
    """Settings with which an algorithm does all that it does in two short rounds."""
    extra: dict[str, Any] = (
        {**DPMS, "preliminary_rounds": 1} if name == "feddpms" else {"local_epochs": 1, "batch_size": 8}
    )
    if name.startswith("fedzda"):
        extra |= {"images_per_class": 2, "inversion_steps": 3}
    if name == "fraug":
        extra |= {"local_steps": 3}
    if name == "feddg":
        extra |= {"bank_size": 4}
    if name == "dpfedavg":
        extra |= {"noise_multiplier": 1e-3}
    if name == "semifl":
        extra |= {"tau": 0.0, "local_steps": 3, "server_steps": 3}
    if name.startswith("sdafl"):
        extra |= {**TINY_GAN, "images_per_client": 4, "server_steps": 1, "local_steps": 2}
    if name in ("fedgan", "feddpgan"):
        extra |= {**TINY_GAN, "images_per_class": 2}
    if name == "fedcvae":
        extra |= {"decoder_samples": 20, "decoder_epochs": 1, "classifier_samples": 40, "classifier_epochs": 2}
    if name in ("fedgauss", "dpmerf"):
        extra |= {"images_per_class": 8, "classifier_epochs": 2}
    if name == "dpmerf":
        extra |= {"embedding": "fourier(20)", "generator_steps": 2, "generator_width": 4}
    return extra


@pytest.mark.parametrize("name", OURS)
def test_augmentation_reaches_all_that_is_trained_on_or_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    """Images that went through the augmentation are of one value here, and no others reach a network in training."""
    seen: list[Tensor] = []

    def spied(original: Any) -> Any:
        def call(encoder: Encoder, x: Tensor) -> Any:
            if encoder.training:
                seen.append(x.detach())
            return original(encoder, x)

        return call

    monkeypatch.setattr(Encoder, "forward", spied(Encoder.forward))
    monkeypatch.setattr(Encoder, "distribution", spied(Encoder.distribution))
    monkeypatch.setattr("fedfill.training.fit.augmented", lambda images, kind, generator: torch.full_like(images, 0.25))
    extra = quick(name) | ({"mix": 0.0} if name in ("naivemix", "fedmix", "feddg") else {})
    federation = small_federation(labelled=8 if name in ("semifl", "fixmatch") else None)
    algorithm = find(name)(**extra, augmentation="crop")
    if name in ("fixmatch", "mixup", "semifl", "sdafl", "sdafl-ac"):
        with refused("augmentation", f"crop with {name},"):
            run_rounds(algorithm, rounds=2, model={"width": "wide"}, federation=federation)
        return
    run_rounds(algorithm, rounds=2, model={} if name in PLAIN else {"width": "wide"}, federation=federation)
    assert len(seen) > 8
    assert all(bool((x == 0.25).all()) for x in seen)


@pytest.mark.parametrize("name", [name for name in OURS if name not in PLAIN])
@pytest.mark.parametrize("buffers", ["average", "frozen"])
def test_running_statistics_follow_the_policy(name: str, buffers: str):
    """With batch norm: averaged they move, frozen they stay as the initial model has them; no counter is a mean."""
    extra = quick(name)
    federation = small_federation(samples=16, labelled=8 if name in ("semifl", "fixmatch") else None)
    server = run_rounds(find(name)(**extra, buffers=buffers), rounds=2, model={"width": "wide"}, federation=federation)
    models = [find(name)(**extra).global_weights(server)]
    if find(name).personal:
        models = [find(name)().personal_weights(state, models[0]) for state in server.client_states.values()]
    for weights in models:
        moved = [n for n in weights if "running" in n and not torch.equal(weights[n], server.initial[n])]
        counters = [int(weights[n]) for n in weights if n.endswith("num_batches_tracked")]
        assert counters
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        if buffers == "average":
            assert len(moved) >= 6
            assert min(counters) > 0 or name == "dpfedavg"  # where they stay at home
            assert all((weights[n] > 0).all() for n in weights if n.endswith("running_var"))
        else:
            assert not moved
            assert set(counters) == {0}


class Tied(torch.nn.Module):
    """Two layers that share their weight, which therefore has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = torch.nn.Linear(64, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.first(x.flatten(1)).relu()).relu())


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fedprox",
        "scaffold",
        "fednova",
        "qffl",
        "feddyn",
        "dpfedavg",
        "partialfed",
        "fedavgm",
        "fedadam",
        "feddc",
        "fedntd",
        "fedsam",
        "mofedsam",
        "fedcurv",
        "ditto",
        "pfedme",
        "perfedavg",
        "ifca",
        "clusteredsampling",
        "cfl",
        "fesem",
    ],
)
def test_shared_layers_stay_shared(name: str, tmp_path: Path):
    options = {
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "local_epochs": 1,
        "clients": 3,
        "rounds": 2,
        "data_fraction": 0.2,
    }
    result = fedfill.run(name, model=Tied(), out=tmp_path, **options)
    pairs = [n for n in result.weights if n.endswith("a.weight")]
    assert pairs
    assert all(torch.equal(result.weights[n], result.weights[f"{n.removesuffix('a.weight')}b.weight"]) for n in pairs)


class InPlace(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        return super().forward(x)


@pytest.mark.parametrize("name", ["fedavg", "qffl", "fedmix", "naivemix", "fedntd", "fedsam", "fedcurv"])
def test_a_network_that_works_in_place_leaves_the_data_alone(name: str, tmp_path: Path):
    inputs, labels = torch.randn(200, 6), torch.arange(200) % 3
    data = (inputs.clone(), labels, inputs[:50].clone(), labels[:50])
    options = {
        "learning_rate": 1e-12,
        "local_epochs": 1,
        "clients": 2,
        "rounds": 3,
        "partition": "iid",
        "client_test": 0.2,
    }
    result = fedfill.run(name, data=data, model=InPlace(6, 3), out=tmp_path, **options)
    losses = [record["loss"] for record in result.rounds]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


STOPPED = {
    "scaffold": {}, "moon": {}, "feddyn": {}, "naivemix": {"group_size": 8}, "fedmix": {"group_size": 8}, "qffl": {},
    "fednova": {}, "dpfedavg": {}, "fedvae": {}, "local": {}, "central": {},
    **{name: {"labelled_per_client": 16, "tau": 0.15, "local_steps": 3} for name in ("fixmatch", "mixup", "semifl")},
    "softmax": {"features": "conv(10) > project(16)", "target_epsilon": 5.0},
    "fedbn": {"model": "cnn2bn"}, "lgfedavg": {"warm_rounds": 1}, "fedper": {}, "fedrep": {"head_epochs": 1}, "fedbabu": {}, "ditto": {}, "fedproto": {}, "ifca": {}, "clusteredsampling": {}, "mixstyle": {}, "cfl": {"warm_rounds": 0, "still": 9.0, "gamma": 0.0}, "fesem": {}, "fedrod": {}, "pfedme": {"personal_steps": 2}, "perfedavg": {}, "pfedavg": {"personal_epochs": 2}, "partialfed": {"model": "cnn2bn"},
    "fraug": {"model": "cnn2bn", "local_steps": 3, "generator_norm": "local"},
    "fedavgm": {}, "fedyogi": {}, "feddc": {}, "pfnm": {"own_start": True}, "fedma": {}, "fedsam": {}, "mofedsam": {}, "fedcurv": {}, "feddg": {}, "fedgen": {},
    "fedda-cvae": {"knowledge_round": 1},
    "feddpms": {"local": "scaffold", "optimizer": "sgd", "preliminary_rounds": 1, "alpha": 5, "max_candidates": 50},
}  # fmt: skip


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(name: str, tmp_path: Path):
    options = {
        "clients": 4,
        "rounds": 3,
        "local_epochs": 1,
        "data_fraction": 0.2,
        "participation": 0.6,
        **STOPPED[name],
    }
    whole = fedfill.run(name, out=tmp_path / "whole", **options)

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record.get("round") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfill.run(name, out=tmp_path / "stopped", on_round=stop, **options)
    again = fedfill.resume(tmp_path / "stopped")
    assert again.resumed_after == 2
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_two_parts_that_keep_the_same_name_are_refused() -> None:
    class KeepsControl(FedAvg):
        """Keeps what SCAFFOLD keeps."""

        name = "keeps-control"

        def client_state(self) -> dict[str, Any]:
            return {**super().client_state(), "control": 1}

    try:
        with pytest.raises(ContractError, match=r"keeps-control.*scaffold.*'control'"):
            KeepsControl(local="scaffold", optimizer="sgd").resolved(
                rounds=1, model=torch.nn.Linear(2, 2), inputs=torch.zeros(1, 2)
            )
    finally:
        registered.pop("keeps-control")


def test_no_two_algorithms_that_go_together_keep_something_under_the_same_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    kinds = [kind for kind in known_algorithms().values() if issubclass(kind, Composable) and kind.name]
    values = [(axis, name) for axis in ("local", "aggregation") for name in able(axis)]
    pairs = [(kind, axis, name) for kind in kinds for axis, name in values if axis not in kind.axes()]
    assert len(pairs) > 300
    for kind, axis, name in pairs:
        kind(**{axis: name})._check_states(weights_of(model))
