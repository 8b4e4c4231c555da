"""The formulas of docs/costs.md against the bytes that a run counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.same_bits import GIVEN, table, times
from tests.helpers import without_mbi

import fedfill
from fedfill import tree
from fedfill.algorithms import known_algorithms
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part, rest, weights_of
from fedfill.runs.directory import RunDirectory
from fedfill.synthesis import gan
from fedfill.synthesis.cvae_networks import CVAESettings, decoder_of, start
from fedfill.synthesis.gan_networks import GANSettings
from fedfill.tree import Weights

HEADS = ("fed3r", "fedcgs", "ccvr", "pfed3r")
FEATURES = {"features": "conv(20) > project(24)"}
F = 24
GRAM = 4 * F * (F + 1) // 2  # bytes of a triangle of sums that 32 bits hold
K, T, L, CLASSES, PIXELS = 4, 2, 16, 10, 64  # clients, rounds, latent size, classes, values of an image
OPTIONS: dict[str, Any] = {"data": "digits", "clients": K, "rounds": T, "local_epochs": 1, "data_fraction": 0.2}


def parameters(*needs: str) -> Weights:
    return weights_of(build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=needs, seed=0))


def count(weights: Weights) -> int:
    return sum(tensor.numel() for tensor in weights.values())


P, PM = count(parameters()), count(parameters("projection"))
PH = L * CLASSES + CLASSES  # the classifier
BN = sum(
    t.numel() * t.element_size()
    for t in weights_of(build("cnn2bn", (1, 8, 8), CLASSES, ModelSettings(), seed=0)).values()
)  # parameters, and buffers of batch norm
SHARED = BN - 4 * 4 * (16 + 32) - 2 * 8  # without scales, shifts, means, variances and counters
# FRAug's generator: 64 values of noise and a class to 128 and 128, each with batch norm
GENERATOR = 4 * ((74 * 128 + 128) + (128 * 128 + 128) + 2 * 4 * 128) + 2 * 8
# FedGEN's generator: 32 values of noise and a class to 256, with batch norm, and to a latent code
LATENTS = 4 * ((42 * 256 + 256) + (256 * L + L) + 4 * 256) + 8
# of the GANs below, with batch norm's statistics; the critic without and with ten classes
GAN = {"gan_iterations": 3, "gan_chunk": 2, "gan_width": 4, "gan_latent": 4}
IMAGES = 5


def of_the_gan() -> tuple[int, int]:
    """Bytes of generator and critic."""
    made = gan.start((1, 8, 8), GANSettings(latent=4, width=4, classes=CLASSES), torch.Generator())
    return tree.size(made.generator), tree.size(made.critic)


PV, D = count(rest(parameters("decoder"), "decoder")), count(part(parameters("decoder"), "decoder"))

# per client and round: bytes down, bytes up
EACH: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("fedavg", "fedprox", "feddyn", "dpfedavg", "fixmatch", "mixup"), (4 * P, 4 * P + 8)),
    **dict.fromkeys(("fednova", "qffl"), (4 * P, 4 * P + 16)),
    **dict.fromkeys(("fedavgm", "fedadam", "fedyogi", "fedadagrad"), (4 * P, 4 * P + 8)),
    **dict.fromkeys(("scaffold", "feddc"), (8 * P, 8 * P + 8)),
    **dict.fromkeys(("fedlc", "fedrs", "fedntd", "feddecorr", "fedsam", "mixstyle"), (4 * P, 4 * P + 8)),
    "mofedsam": (8 * P, 4 * P + 16),
    "fedcurv": (12 * P, 12 * P + 8),
    "moon": (4 * PM, 4 * PM + 8),
    "fedvae": (4 * (PV + D), 4 * (PV + D) + 8),
    **dict.fromkeys(
        ("pfedavg", "partialfed", "ditto", "pfedme", "perfedavg", "fedrod", "cfl", "fesem"), (4 * P, 4 * P + 8)
    ),
    "fedbn": (SHARED, SHARED + 8),
    **dict.fromkeys(("fedper", "fedrep", "fedbabu"), (4 * (P - PH), 4 * (P - PH) + 8)),
    "local": (0, 0),
}


def expected(name: str, result: fedfill.Result) -> dict[str, dict[str, int]]:
    """Bytes of the whole run by handler."""
    if name in EACH:
        down, up = EACH[name]
        return {"train": {"down": K * T * down, "up": K * T * up}}
    if name == "fedproto":  # of the classes that each client has
        rows = json.loads((result.directory / "partition.json").read_text())["clients"]
        held = sum(n > 0 for row in rows for n in row)
        return {"train": {"down": K * T * (4 * CLASSES * L + CLASSES), "up": T * held * (4 * L + 16)}}
    if name == "clusteredsampling":  # sizes, once
        return {
            "size": {"down": 0, "up": K * 8},
            "train_drawn": {"down": K * T * (4 * P + 8), "up": K * T * (4 * P + 16)},
        }
    if name == "ifca":  # two models down
        return {"choose_and_train": {"down": K * T * 2 * 4 * P, "up": K * T * (4 * P + 16)}}
    if name == "pfnm":
        return {"train": {"down": K * T * 4 * P, "up": K * T * (4 * P + 8 * CLASSES)}}
    if name == "fedma":  # after the first of four layers, three come back with their units' places
        first, hidden = 16 * 9 + 16, 16 + 32 + L
        return {
            "train": {"down": K * T * 4 * P, "up": K * T * (4 * first + 8 * CLASSES)},
            "retrain": {"down": K * T * (4 * (P - PH) + 8 * hidden + 3 * 8), "up": K * T * 4 * (P - first)},
        }
    if name == "lgfedavg":
        return {"train_divided": {"down": K * T * 4 * PH, "up": K * T * (4 * PH + 8)}}
    if name == "fraug":
        each = SHARED + GENERATOR
        return {"train_augmented": {"down": K * T * (each + 16), "up": K * T * (each + 8)}}
    if name == "fedzdas":
        return {"train_real": {"down": K * T * (BN + 1), "up": K * T * (BN + 8)}}
    if name == "fedzdac":  # images in the second round: four losses tell of them
        return {"train_augmented": {"down": K * T * (BN + 1), "up": K * (T * (BN + 8) + 4 * 8)}}
    if name == "central":  # one place in the place of K
        return {"train": {"down": T * (4 * P + 8), "up": T * 4 * P}}
    if name in HEADS:  # one round; the counts of a few classes, their moments, and one Gram matrix or one for each
        grams = CLASSES * GRAM if name == "ccvr" else GRAM
        head = 4 * F * CLASSES + 4 * CLASSES
        legs = {"sums": {"down": K * 8, "up": K * (grams + 4 * F * CLASSES + 4 * CLASSES)}}
        return {**legs, "own": {"down": K * (8 + head), "up": 0}} if name == "pfed3r" else legs
    if name == "fedcvae":  # one round
        begin = start(CVAESettings((1, 8, 8), CLASSES), torch.Generator())
        whole, decoder = tree.size(begin), tree.size(decoder_of(begin))
        return {"train_cvae": {"down": K * whole, "up": K * (decoder + 8 * CLASSES)}}
    if name == "fedgauss":  # one round; 6 of 8 frequencies along each side, and a Gram matrix for each class
        d = 6 * 6
        moments = 4 * (d * CLASSES + CLASSES * d * (d + 1) // 2)
        return {"moment_sums": {"down": K * (8 + 1 + 8), "up": K * (moments + 4 * CLASSES)}}
    if name == "dpmerf":  # one exchange before the one round
        return {"embeddings": {"down": K * 8, "up": K * 4 * (100 * CLASSES + CLASSES)}}
    if name == "mst":  # counts of each column; then, with the label, of each other
        columns, pairs, words = 9 + 3 + 4 + 2, 2 * (9 + 3 + 4), len("columns") + len("tables")
        asked = 2 * 8 + words + 8 * 4 + 8 * 2 * 3
        return {"count": {"down": K * asked, "up": K * 4 * (columns + pairs)}}
    if name == "aim":  # counts of each column and of each pair, then of two of the pairs
        columns, pairs, words = 9 + 3 + 4 + 2, 27 + 36 + 18 + 12 + 6 + 8, len("columns") + len("candidates")
        asked = 2 * 8 + words + 8 * 4 + 8 * 2 * 6
        document = RunDirectory(result.directory).read_checkpoint() or {}
        turns = [found["cliques"][0] for found in document["server"]["measured"]]
        told = sum(math.prod((9, 3, 4, 2)[k] for k in clique) for clique in turns)
        return {
            "count": {"down": K * asked, "up": K * 4 * (columns + pairs)},
            "measure": {"down": K * 2 * (8 + len("turn") + 16 + 8), "up": K * 4 * told},
        }
    if name == "moments":  # one exchange; the age
        return {"sum": {"down": K * 8, "up": K * 20}}
    if name == "kaplanmeier":  # one exchange; 9 times of the grid
        return {"count": {"down": K * 8, "up": K * 4 * (2 * 9 + 1)}}
    if name == "cox":  # 6 coefficients; the sums of the last step are asked for twice
        g, p, steps = 9, 6, result.summary["findings"]["steps"] + 1
        return {
            "counts": {"down": 0, "up": K * 8 * (2 * g + 1 + 2 * p)},
            "risks": {"down": steps * K * 16 * p, "up": steps * K * 8 * g * (1 + p + p * (p + 1) // 2)},
            "ranks": {"down": K * 8 * (p + 2), "up": K * 8 * (3 + 100 * (2 * g + 1))},
        }
    if name == "fedpft":  # ten components of each class that a client has, or as many as it has records
        rows = json.loads((result.directory / "partition.json").read_text())["clients"]
        components = sum(min(n, 10) for row in rows for n in row)
        return {"fit_own": {"down": K * 8, "up": components * (8 + 4 + 4 * F + 4 * F)}}
    if name == "softmax":  # gradients are no whole numbers
        return {
            "gram_sums": {"down": K * 8, "up": K * (GRAM + 4 * CLASSES)},
            "gradient_sums": {"down": K * T * (8 + 4 * F * CLASSES), "up": K * T * 8 * F * CLASSES},
        }
    if name == "semifl":  # clients with nothing to train on send a number
        counts = json.loads((result.directory / "partition.json").read_text())["clients"]
        active = sum(n > 0 for record in result.rounds for n in record["confident"].values())
        return {
            "share": {"down": 0, "up": sum(map(sum, counts)) * (PIXELS + 8) + 8 * K},
            "train_confident": {"down": K * T * 4 * P, "up": K * T * 8 + active * 4 * P},
        }
    if name in ("naivemix", "fedmix"):
        sizes = [sum(row) for row in json.loads((result.directory / "partition.json").read_text())["clients"]]
        means = sum(max(1, n // 64) for n in sizes) * 4 * (PIXELS + CLASSES)
        return {
            "share_means": {"down": 0, "up": means},
            "train_mixed": {"down": K * (T * 4 * P + means), "up": K * T * (4 * P + 8)},
        }
    if name == "fedda-cvae":  # the codes are exchanged before the second round
        rows = json.loads((result.directory / "partition.json").read_text())["clients"]
        classes = sum(n > 0 for row in rows for n in row)
        return {
            "share_knowledge": {"down": K * 4 * PV, "up": classes * (4 * L + 8)},
            "train_filled": {"down": K * (T * 4 * PV + CLASSES * (4 * L + 1)), "up": K * T * (4 * PV + 8)},
        }
    if name == "feddg":  # of images of 8 pixels a tenth is less than one frequency: s is 1
        sizes = [sum(row) for row in json.loads((result.directory / "partition.json").read_text())["clients"]]
        bank = sum(min(50, n) for n in sizes)
        return {
            "share_spectra": {"down": 0, "up": 4 * bank},
            "train_styled": {"down": K * (T * 4 * P + bank * (4 + 8)), "up": K * T * (4 * P + 8)},
        }
    if name.startswith("sdafl"):  # in the first round no image has a label, unless the GANs know them
        known = name == "sdafl-ac"
        labels = K * IMAGES * (T if known else T - 1)
        return {
            "pretrain_gan": {"down": K * 2 * 8, "up": K * 2 * 8},
            "upload": {"down": K * 8, "up": K * IMAGES * (PIXELS + 8 * known)},
            "train_aided": {"down": K * (T * 4 * P + K * IMAGES * PIXELS + labels), "up": K * T * (4 * P + 8)},
        }
    if name == "fedgen":  # the generator from the second round on
        return {
            "train_guided": {
                "down": K * (T * 4 * P + (T - 1) * (LATENTS + 4 * CLASSES)),
                "up": K * T * (4 * P + 8 + 8 * CLASSES),
            }
        }
    if name in ("fedgan", "feddpgan"):  # two exchanges
        generator, critic = of_the_gan()
        samples = 8 if name == "fedgan" else 0
        return {
            "train_gan": {"down": K * 2 * (generator + critic + 8), "up": K * 2 * (generator + critic + samples)},
            "train_augmented": {"down": K * (T * 4 * P + generator), "up": K * T * (4 * P + 8)},
        }
    assert name == "feddpms", f"{name} has no formula yet; it goes here and into docs/costs.md"
    # one preliminary round, which sends the decoder up, and one secondary, in which everybody shares
    rows = [[row["accepted"] for row in classes.values()] for classes in result.rounds[1]["acceptance"].values()]
    shared = [row for row in rows if any(row)]
    told = sum(8 * 3 * len(row) for row in rows) + sum(8 * 2 * len(row) + 4 * L * sum(row) for row in shared)
    return {
        "preliminary_client": {"down": K * (4 * PV + 1), "up": K * (4 * (PV + D) + 8)},
        "secondary_client": {"down": K * (4 * (PV + D) + 2), "up": K * (4 * PV + 9) + told},
    }


@pytest.mark.parametrize("name", [n for n, k in known_algorithms().items() if k.__module__.startswith("fedfill.")])
def test_bytes_follow_the_formulas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own: dict[str, Any] = {}
    without_mbi(monkeypatch)
    if name.startswith("fedzda"):
        own = {"model": "cnn2bn", "inversion_steps": 2, "images_per_class": 2}
    elif name.startswith("sdafl"):
        own = {**GAN, "images_per_client": IMAGES, "local_steps": 2, "server_steps": 1, "tau": 0.0}
    elif name in ("fedbn", "fraug"):
        own = {"model": "cnn2bn"}
    elif name == "semifl":
        own = {"labelled_per_client": 20, "tau": 0.3}
    elif name in ("fedgan", "feddpgan"):
        own = {**GAN, "images_per_class": 2}
    elif name == "fedcvae":
        own = {"classifier_samples": 50, "decoder_samples": 50}
    elif name == "fedgauss":
        own = {"images_per_class": 5, "classifier_epochs": 1}
    elif name in ("mst", "moments", "aim"):
        own = {
            **({"turns": 2} if name == "aim" else {}),
            "data": table(),
            "schema_file": GIVEN["its schema"](),
            "partition": "iid",
        }
    elif name in ("cox", "kaplanmeier"):
        own = {"data": times(), "schema_file": GIVEN["their schema"](), "partition": "iid", "data_fraction": 1.0}
    elif name == "dpmerf":
        own = {"images_per_class": 5, "classifier_epochs": 1, "embedding": "fourier(100)", "generator_steps": 2}
    elif name in (*HEADS, "softmax", "fedpft"):
        own = FEATURES
    result = fedfill.run(name, **{**OPTIONS, **own}, out=tmp_path / name)
    formula = expected(name, result)
    assert result.summary["bytes_by_handler"] == formula
    assert result.summary["bytes_down"] == sum(leg["down"] for leg in formula.values())
    assert result.summary["bytes_up"] == sum(leg["up"] for leg in formula.values())


@pytest.mark.parametrize("every", [None, 1])
def test_bytes_of_a_head(every: int | None, tmp_path: Path):
    """The trained network goes down once more for each head, and sums over what its last layer receives come up; none of
    these but the counts are whole numbers, as nothing bounds a trained feature."""
    result = fedfill.run("fedavg", **OPTIONS, head="fed3r", head_every=every, out=tmp_path)
    heads, sums = T if every else 1, 8 * (L * (L + 1) // 2 + L * CLASSES) + 4 * CLASSES
    assert result.summary["bytes_by_handler"] == {
        **expected("fedavg", result),
        "head_sums": {"down": K * heads * (4 * P + 8), "up": K * heads * sums},
    }


def test_bytes_of_learned_filters_and_of_noise(tmp_path: Path):
    """Six numbers to a side of a patch, three filters, two steps of k-means; under noise all is of 32 bits."""
    patch, filters, steps = 16, 3, 2
    learned = {"features": f"patches({filters}, size=4, cells=1) > project({F})", "filter_steps": steps}
    result = fedfill.run("fed3r", **OPTIONS, **learned, out=tmp_path / "learned")
    dictionary, whitening = 4 * filters * patch, 4 * patch + 4 * patch * patch
    centre = 4 * 2 * filters
    legs = result.summary["bytes_by_handler"]
    assert legs["patch_moments"]["down"] == K * 8
    assert legs["patch_clusters"]["down"] == K * (steps * (8 + whitening) + (steps - 1) * dictionary)
    assert legs["sums"]["down"] == K * (8 + whitening + dictionary + centre)
    noisy = fedfill.run("fed3r", **OPTIONS, **FEATURES, target_epsilon=3.0, out=tmp_path / "noisy")
    numbers = 2 * 20 * 16  # features before they are projected: their mean is asked for first
    assert noisy.summary["bytes_by_handler"] == {
        "feature_sum": {"down": K * 8, "up": K * 4 * (numbers + 1)},
        "sums": {"down": K * (8 + 4 * numbers), "up": K * (GRAM + 4 * F * CLASSES)},
    }
