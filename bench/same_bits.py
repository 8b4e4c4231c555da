"""Whether every algorithm still gives the same bits, after a change that should leave them alone.

``python bench/same_bits.py`` runs all cases of ``same_bits.json`` with the options that are kept there. It compares the
SHA-256 of the final weights, the bytes of each exchange and the privacy account with what is kept, and prints one line
for each case. It ends with 1 where anything differs. The options hold every setting that can change a bit, so another
default changes nothing here.

``--record`` writes ``same_bits.json`` anew: with the options that are kept of a case, and for a new case of `CASES`
with its own.

Bits depend on the kind of processor and on the version of torch, so only runs of one machine can be compared. The
script warns where ``same_bits.json`` is of another machine; differences then say nothing. Record on the commit before
the change first, and compare with that.

Only `fedfill.run`, `fedfill.resume`, their results and the files of a run are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedfill
from fedfill.algorithms import find

KEPT = Path(__file__).with_suffix(".json")

COMMON = {
    "data": "digits",
    "data_fraction": 0.5,
    "domain_fractions": "none",
    "image_size": "none",
    "partition": "dirichlet:0.5",
    "clients": 4,
    "client_test": 0.1,
    "client_validation": "none",
    "labelled_per_client": "none",
    "participation": 1.0,
    "rounds": 3,
    "evaluate_every": "none",
    "seed": 1,
    "model": "cnn2",
    "engine": "local",
    "device": "cpu",
    "min_replies": 1,
    "reply_timeout": "none",
    "delta": 1e-5,
    "local_epochs": 1,
    "batch_size": 16,
    "augmentation": "none",  # a run's folder does not name it where it is none
}
"""Options of every case. What is left is read from the run's folder at the recording."""

SGD = {"optimizer": "sgd", "learning_rate": 0.05}
LATE = {"rounds": 4, "participation": 0.5}
DPMS = {
    "rounds": 4, "preliminary_rounds": 2, "local_epochs": 3, "learning_rate": 0.01, "alpha": 20, "sigma": 0.5, "max_candidates": 400,
}  # fmt: skip
ZDA = {"model": "cnn2bn", "start_round": 1, "images_per_class": 2, "inversion_steps": 5}
GANS = {
    "gan_iterations": 4,
    "gan_chunk": 2,
    "gan_critic_steps": 2,
    "gan_batch_size": 16,
    "gan_width": 8,
    "gan_latent": 8,
}
SDA = {
    **GANS, "model": "cnn2bn", "images_per_client": 40, "tau": 0.14, "learning_rate": 0.1, "local_steps": 10, "server_steps": 5,
}  # fmt: skip
FEW_LABELS = {"model": "cnn2bn", "labelled_per_client": 40, "local_steps": 10, "unlabelled_batch_size": 32, "tau": 0.3}
CVAES = {"decoder_samples": 100, "decoder_epochs": 2, "classifier_samples": 200, "classifier_epochs": 2}
IMAGES = {"images_per_class": 40, "classifier_epochs": 2}
TABLE = {"data": "a table", "schema_file": "its schema", "partition": "iid", "model": "mlp", "data_fraction": 1.0}
TIMES = {"data": "times", "schema_file": "their schema", "partition": "iid", "model": "hazards", "data_fraction": 1.0}
SUMS = {"model": "features", "model.features": "conv(20) > project(64)"}
FRAUG = {"model": "digits6", "data_fraction": 0.3, "local_steps": 3, "rounds": 2}

CASES: dict[str, dict[str, Any]] = {
    # the algorithms
    "ccvr": {**SUMS, "model.features": "conv(20) > project(24)"},
    "central": {},
    "dpfedavg": {"participation": 0.5},
    "fed3r": SUMS,
    "fedavg": {},
    "fedavgm": {"participation": 0.5},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "fedbn": {"model": "cnn2bn"},
    "fedcgs": SUMS,
    "fedcvae": CVAES,
    "feddpgan": {**GANS, "images_per_class": 4},
    "fedgan": {**GANS, "images_per_class": 4},
    "fedgen": {"participation": 0.5},
    "feddpms": DPMS,
    "feddyn": SGD,
    "feddc": {"participation": 0.5},
    "fedmix": {"group_size": 16, "first_order": True, **SGD},  # a run's folder names it only where it is false
    "fednova": {},
    "pfnm": {"own_start": True, "prior_variance": 2.0},
    "fedma": {"participation": 0.5, "retrain_epochs": 2},
    "mst": TABLE,
    "cox": TIMES,
    "cox, by site": {**TIMES, "strata": "site"},
    "aim": {**TABLE, "turns": 3, "target_epsilon": 5.0},
    "moments": {**TABLE, "target_epsilon": 5.0},
    "kaplanmeier": {**TIMES, "group": "arm"},
    "kaplanmeier, noise": {**TIMES, "group": "site", "target_epsilon": 5.0},
    "mst, tree": {**TABLE, "structure": "augmented", "target_epsilon": 5.0},
    "fedprox": {"mu": 0.1},
    "fedgauss": IMAGES,
    "fedpft": {**SUMS, "components": 3, "head_steps": 100},
    "dpmerf": {**IMAGES, "embedding": "fourier(200)", "generator_steps": 20, "generator_width": 8},
    "fedgauss, noise": {**IMAGES, "target_epsilon": 10.0, "trust": "server"},
    "feddg": {"band": 0.3, "bank_size": 10},
    "fedda-cvae": {"partition": "classes:3"},
    "fedvae": {},
    "fedzdac": ZDA,
    "fedzdas": ZDA,
    "fixmatch": FEW_LABELS,
    "ditto": {},
    "fedproto": {"partition": "classes:3"},
    "ifca": {"clusters": 3, "model": "cnn2bn"},
    "clusteredsampling": {"participation": 0.5},
    "mixstyle": {"model": "cnn2bn"},
    "cfl": {"warm_rounds": 1, "still": 9.0, "gamma": 0.0},
    "cfl, once": {"when": "once", "warm_rounds": 1, "participation": 0.5},
    "fesem": {"model": "cnn2bn", "participation": 0.75},
    "fedrod": {"partition": "classes:3"},
    "pfedme": {"personal_steps": 3},
    "perfedavg": {"model": "cnn2bn"},
    "fedbabu": {"personal_epochs": 1},
    "fedper": {},
    "fedrep": {"head_epochs": 2, "model": "cnn2bn"},
    "lgfedavg": {"warm_rounds": 1},
    "fraug": FRAUG,
    "local": {},
    "mixup": FEW_LABELS,
    "moon": {},
    "fedlc": {},
    "fedrs": {"partition": "classes:3"},
    "fedntd": {},
    "feddecorr": {},
    "fedsam": {},
    "mofedsam": {"participation": 0.5},
    "fedcurv": {"participation": 0.5},
    "naivemix": {"group_size": 16},
    "partialfed": {"model": "mlp"},
    "pfed3r": SUMS,
    "pfedavg": {},
    "qffl": SGD,
    "scaffold": {},
    "sdafl": SDA,
    "sdafl-ac": SDA,
    "semifl": {**FEW_LABELS, "server_steps": 10, "tau": 0.2},
    "softmax": SUMS,
    # heads from sums
    "fed3r, learned filters": {"model": "features", "model.features": "patches(16, size=4, cells=1) > project(32)", "filter_steps": 3},
    "fed3r, noise": {**SUMS, "target_epsilon": 3.0},
    "fedcgs, noise of the server": {**SUMS, "target_epsilon": 3.0, "trust": "server", "prior": "uniform"},
    "fedcgs, a covariance for each class": {**SUMS, "model.features": "conv(20) > project(24)", "covariance": "class"},
    "softmax, noise": {**SUMS, "target_epsilon": 3.0, "trust": "secure"},
    "fedavg, head after each round": {"head": "ccvr:samples=50", "head_every": 1, "head_mode": "replace"},
    "fedprox, head beside": {"mu": 0.1, "head": "fed3r"},
    "fedbn, head": {"model": "cnn2bn", "head": "fedcgs"},
    # compositions
    "feddpms with fedprox and qffl": {**DPMS, **SGD, "local": "fedprox:mu=0.01", "aggregation": "qffl:q=1"},
    "sdafl with scaffold": {**SDA, "local": "scaffold"},
    "sdafl with moon and qffl": {**SDA, "local": "moon:contrast=latent", "aggregation": "qffl:q=0.5"},
    "fedmix with moon and fednova": {"group_size": 16, "first_order": True, **SGD, "local": "moon", "aggregation": "fednova"},
    "fedzdas with fednova": {**ZDA, "aggregation": "fednova"},
    "fedbn with fedprox and dpfedavg": {"model": "cnn2bn", "local": "fedprox:mu=0.1", "aggregation": "dpfedavg:clip=0.5"},
    # half of the clients in a round
    "feddpms, half of the clients": {**DPMS, "participation": 0.5, "rounds": 6},
    "scaffold, half of the clients": LATE,
    "naivemix, half of the clients": {"group_size": 16, **LATE},
    "fraug, half of the clients": {**FRAUG, **LATE, "model": "cnn2bn"},
    # further settings
    "fedavg, steps and momentum": {
        **SGD, "local_steps": 7, "momentum": 0.9, "weight_decay": 0.001, "lr_decay": 0.5, "lr_decay_every": 1,
        "weighting": "uniform", "augmentation": "shift", "partition": "classes:3",
    },
    "fedavg, validation": {"model": "cnn2bn", "client_validation": 0.2, "evaluate_every": 2, "buffers": "frozen"},
    "fedavg, wide": {"model.width": "wide", "model.dropout": 0.2, "model.projection": 16, "model.latent_activation": "none"},
    "fedavg, resnet18": {"model": "resnet18", "data_fraction": 0.1, "rounds": 1},
    "fedavg, a module of one's own": {"model": "own"},
    "fedbn, two domains": {"data": "two domains", "partition": "domain:2", "clients": "none", "model": "cnn2bn"},
    "feddpms, single release": {**DPMS, "mechanism": "single_release", "release_sigma": 0.3},
    "feddpms, public filter": {**DPMS, "mechanism": "public_filter"},
    "feddpms, prior": {**DPMS, "mechanism": "prior"},
    "feddpms, shared early": {**DPMS, "share_at": "preliminary_end", "encoder": "global", "decoder_sync": "every"},
    "feddpms, clipped": {
        **DPMS, "model.latent_activation": "none", "latent_bound": "clip", "noise": "sensitivity", "sigma": 1.0,
        "only_scarce": True, "n_assistants": 2, "secondary_latent": "mean",
    },
    "feddpms, means of all clients": {
        **DPMS, "means": "global", "target_epsilon": 30.0, "trust": "secure", "reconstruction": "mse_sum", "reconstruction_weight": 2.0,
    },
    "feddpms, agreed numbers": {
        **DPMS, "n_classes": "auto", "alpha": "auto", "want": "missing", "n_assistants": "cover", "centre": "wrong",
    },
    "fedzdac, server's images": {**ZDA, "generate_at": "server_broadcast", "server_step": "zdas"},
    "fedzdac, missing classes": {**ZDA, "augmented_classes": "missing", "few": 3, "reuse_rounds": 2, "jitter": 1},
    "fedmix, zeroth order": {"group_size": 16, "first_order": False, **SGD},
    "fedmix, batch norm": {"group_size": 16, "first_order": True, **SGD, "model": "cnn2bn"},
    "fedcvae, ens": {**CVAES, "aggregate": "ens", "balanced": True},
    "fedcvae, dpsgd": {**CVAES, "noise": "dpsgd", "target_epsilon": 10.0},
    "feddpgan, dpsgd": {**GANS, "images_per_class": 4, "noise": "dpsgd"},
    "fraug, local norm": {
        **FRAUG, "data": "two domains", "partition": "domain:2", "clients": "none", "generator_norm": "local",
        "generator_distance": "mean_cov", "rtnet_distance": "l2", "residual_schedule": "constant",
    },
    "moon, logits": {"contrast": "logits"},
    "partialfed, fixed": {"model": "mlp", "strategy": "fixed"},
    "pfedavg, fine-tuned": {"personal_epochs": 2},
    "sdafl, dpsgd": {**SDA, "noise": "dpsgd", "labelled_per_client": 40},
    "semifl, half of the clients": {**FEW_LABELS, **LATE, "model": "cnn2", "server_steps": 10, "tau": 0.2},
}  # fmt: skip
CASES |= {
    f"{name}, resumed": CASES[name]
    for name in (
        "feddpms, half of the clients",
        "fraug, half of the clients",
        "sdafl",
        "scaffold",
        "partialfed",
        "semifl",
    )
}
"""By name, which begins with the algorithm's; options beside `COMMON`."""

RESUMED = "resumed"
"""How the name of a case ends that is stopped and resumed after every round, and after every step before the first."""

OF_SHAPE = {"projection", "weights"}
"""Model settings of every built-in network. The others but `stem` belong to these networks alone:"""

ADAPTABLE = {"cnn2", "cnn4"}


RENAMED = {"pretrain": "pretrain_gan"}
"""Handlers that had another name when the cases were recorded."""
IDLE = {
    "keep": ("strategy", "adaptive"),
    "residual_gamma": ("residual_schedule", "constant"),
    "latent_clip": ("latent_bound", "sigmoid"),
}
"""Settings without an effect beside a word of another setting: taken in silence once, refused since."""


def own() -> nn.Module:
    """A network with layers of all kinds, as a user may write one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(128, 10),
        )  # fmt: skip


def two_domains() -> dict[str, Any]:
    """The digits as they are, and with black and white exchanged."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images * 15).to(torch.uint8)[:, None]  # [n, 1, 8, 8]
    labels = torch.from_numpy(bunch.target).long()
    return {"plain": (images[::2], labels[::2]), "inverted": (255 - images[1::2], labels[1::2])}


def table() -> pd.DataFrame:
    """Rows of four hospitals, by the schema ``table.toml``."""
    k = np.arange(400)
    age, stage = 18 + k * 37 % 80, np.array(["low", "middle", "high", None], dtype=object)[k * 13 % 7 % 4]
    died = np.where(age + 25 * (stage == "high") + k * 29 % 31 > 80, "yes", "no")
    ages = np.where(k % 17 == 0, np.nan, age)
    return pd.DataFrame(
        {"hospital": k % 4, "age": ages, "sex": np.where(k % 3, "f", "m"), "stage": stage, "died": died}
    )


def times() -> pd.DataFrame:
    """Rows of four hospitals with times to a relapse, by the schema ``times.toml``."""
    k = np.arange(400)
    age, new = 18 + k * 37 % 80, k % 3 > 0
    grade = np.array(["low", "middle", "high", None], dtype=object)[k * 13 % 7 % 4]
    pace = 1 + (age > 60) + 2 * (grade == "high") - 0.6 * new
    weeks = np.ceil((3 + k * 29 % 61) / pace)
    until = 5 + k * 17 % 43
    rows = {"hospital": k % 4, "age": age, "arm": np.where(new, "new", "old"), "grade": grade}
    return pd.DataFrame({**rows, "weeks": np.minimum(weeks, until), "relapse": (weeks <= until).astype(int)})


GIVEN: dict[str, Callable[[], Any]] = {
    "own": own, "two domains": two_domains, "a table": table, "its schema": lambda: KEPT.with_name("table.toml"),
    "times": times, "their schema": lambda: KEPT.with_name("times.toml"),
}  # fmt: skip
"""What stands for an object in place of `data`, `model` or `schema_file`."""


class Stop(KeyboardInterrupt):
    """Somebody stopped the run."""


def run(name: str, options: dict[str, Any], folder: Path, workers: int) -> fedfill.Result:
    """One case, stopped and resumed where its name says so."""
    given = {key: GIVEN[options[key]]() for key in ("data", "model", "schema_file") if options.get(key) in GIVEN}
    algorithm = re.split("[ ,]", name)[0]
    if not name.endswith(RESUMED):
        return fedfill.run(algorithm, **{**options, **given}, out=folder, workers=workers)

    def stop(record: dict[str, Any], rounds: int) -> None:
        raise Stop

    with contextlib.suppress(Stop):
        return fedfill.run(algorithm, **{**options, **given}, out=folder, workers=workers, on_round=stop)
    for _ in range(50):  # more than any case has rounds and steps
        with contextlib.suppress(Stop):
            return fedfill.resume(folder, **given, workers=workers, on_round=stop)
    raise RuntimeError("a resumed run begins anew each time")


def found(result: fedfill.Result) -> dict[str, Any]:
    """What is kept of a run. The number of entries is not compared: it follows the names of the messages' classes."""
    summary, account = result.summary, result.summary["privacy"]
    return {
        "weights_sha256": summary["weights_sha256"],
        "bytes_by_handler": summary["bytes_by_handler"],
        "total_epsilon": account["total_epsilon"],
        "epsilons": sorted(entry["epsilon"] for entry in account["entries"] if entry["epsilon"]),
        "entries": len(account["entries"]),
    }


def complete(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options with every setting as the run resolved it, but for model settings that the network doesn't have."""
    document = tomllib.loads((folder / "experiment.toml").read_text())
    settings, models = document["settings"], document["model_settings"]
    network = options["model"]
    if network not in ADAPTABLE:
        models = {key: value for key, value in models.items() if key in OF_SHAPE | {"stem"}}
    if network != "resnet18":
        models.pop("stem", None)
    return {**options, **settings, **{f"model.{key}": value for key, value in models.items()}}


def record(name: str, kept: dict[str, Any] | None, workers: int) -> dict[str, Any]:
    """A case as it is kept, with the machine's words beside it; by the options kept of it, if any."""
    options = without_idle(kept["options"]) if kept else {**COMMON, **CASES[name]}
    with tempfile.TemporaryDirectory() as place:
        result = run(name, options, Path(place) / "run", workers)
        case = {"options": complete(options, result.directory), **found(result)}
        if name.endswith(RESUMED):
            whole = found(run(name.removesuffix(RESUMED), options, Path(place) / "whole", workers))
            if differences(whole, case):
                raise RuntimeError(f"{name}: a resumed run differs from a whole one: {differences(whole, case)}")
    return {**case, "machine": result.summary["machine"]}


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a run has otherwise than what is kept, in words."""
    words = []
    if kept["weights_sha256"] != now["weights_sha256"]:
        words.append(f"weights {now['weights_sha256'][:12]} in place of {kept['weights_sha256'][:12]}")
    before = {RENAMED.get(handler, handler): legs for handler, legs in kept["bytes_by_handler"].items()}
    after = now["bytes_by_handler"]
    words += [
        f"bytes of {handler} {after.get(handler, 'none')} in place of {before.get(handler, 'none')}"
        for handler in sorted(before.keys() | after.keys())
        if before.get(handler) != after.get(handler)
    ]
    for key in ("total_epsilon", "epsilons"):
        if kept[key] != now[key]:
            words.append(f"{key} {now[key]} in place of {kept[key]}")
    return words


def machine() -> dict[str, str]:
    """What the bits depend on beside the code, as far as it has a name."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def other_machine(there: dict[str, str]) -> str:
    """In what the machine of a recording differs from this one; nothing where it does not."""
    return ", ".join(
        f"{key} '{there.get(key)}' there and '{word}' here" for key, word in machine().items() if word != there.get(key)
    )


def record_all(names: list[str], document: dict[str, Any], workers: int) -> None:
    """Run cases here, and keep them beside the others of a document."""
    words = {**machine(), "fedfill": fedfill.__version__}
    for name in names:
        start = time.perf_counter()
        case = record(name, document["cases"].get(name), workers)
        words["summary"] = case.pop("machine")
        document["cases"][name] = case
        print(f"recorded {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    cases = {name: document["cases"][name] for name in CASES if name in document["cases"]}
    KEPT.write_text(json.dumps({"machine": words, "cases": cases}, indent=1) + "\n")


def without_idle(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a recording without those that had no effect then and are refused since."""
    idle = {name for name, (other, word) in IDLE.items() if options.get(other) == word}
    return {name: value for name, value in options.items() if name not in idle}


def check(name: str, case: dict[str, Any], workers: int) -> list[str]:
    """What a case gives otherwise than what is kept of it, in words."""
    try:
        with tempfile.TemporaryDirectory() as place:
            return differences(case, found(run(name, without_idle(case["options"]), Path(place) / "run", workers)))
    except Exception as error:  # the other cases are worth a look all the same
        return [f"{type(error).__name__}: {error}"]


def check_all(names: list[str], document: dict[str, Any], workers: int) -> int:
    """Run kept cases again; how many of them differ."""
    wrong = 0
    absent = [name for name in names if not all(map(find_spec, find(name.partition(",")[0]).packages))]
    for name in absent:
        print(f"left    {name}, as its extra is not installed")
    names = [name for name in names if name not in absent]
    for name in names:
        start = time.perf_counter()
        words = check(name, document["cases"][name], workers)
        wrong += bool(words)
        took = time.perf_counter() - start
        print(
            f"{'differs' if words else 'same':7} {name} ({took:.1f} s){': ' if words else ''}{'; '.join(words)}",
            flush=True,
        )
    print(f"{len(names) - wrong} of {len(names)} cases are the same, {wrong} differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {KEPT.name} anew")
    parser.add_argument("--only", action="append", metavar="NAME", help="this case alone; may be given several times")
    parser.add_argument("--workers", type=int, default=2, help="threads over clients, which must not change a bit (2)")
    arguments = parser.parse_args()
    document = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": {}, "cases": {}}
    other = other_machine(document["machine"])
    if other and arguments.record and arguments.only:
        parser.error(f"{KEPT.name} is of another machine ({other}); record all cases, without --only")
    elif other and not arguments.record:
        print(f"warning: {KEPT.name} is of another machine ({other}); only runs of one machine can be compared")
    known = list(CASES if arguments.record else document["cases"])
    if unknown := [name for name in arguments.only or [] if name not in known]:
        parser.error(f"unknown case '{unknown[0]}'; known: {'; '.join(known)}")
    if arguments.record:
        record_all(arguments.only or known, document, arguments.workers)
        return 0
    return int(check_all(arguments.only or known, document, arguments.workers) > 0)


if __name__ == "__main__":
    sys.exit(main())
