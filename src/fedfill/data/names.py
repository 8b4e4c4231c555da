"""Names of data sets and partitions, and what a word may be. No torch is needed here, so that a slip costs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fedfill.errors import FedfillError, did_you_mean

DATASETS = {
    "digits": "scikit-learn's bundled 8x8 grey digits, 1,797 samples, 10 classes; needs no download",
    "mnist": "28x28 grey digits, 60,000 + 10,000, 10 classes",
    "fashion_mnist": "28x28 grey clothes, 60,000 + 10,000, 10 classes",
    "cifar10": "32x32 colour photographs, 50,000 + 10,000, 10 classes",
    "cifar100": "32x32 colour photographs, 50,000 + 10,000, 100 classes",
    "svhn": "32x32 colour house numbers, 73,257 + 26,032, 10 classes",
    "usps": "16x16 grey digits, 7,291 + 2,007, 10 classes",
    "mnist_m": "32x32 colour: MNIST's digits on patches of photographs, 59,001 + 9,001, 10 classes",
    "digits-domains": "mnist, mnist_m, svhn and usps brought to 32x32 colour: four domains, 10 classes",
}
"""The data sets that are known by name, with one line for people; any folder below the data folder is known too."""

PARTITIONS = {
    "iid": "clients of equal size, labels at random",
    "dirichlet:BETA": "label skew: each class is divided by a draw from Dirichlet(BETA); a smaller BETA is more skewed",
    "classes:C": "label skew: every client holds at most C classes, in C pieces of one class each",
    "unimodal:C": "label skew: shards of one class and of nearly one size, C of them for each client (McMahan et al.)",
    "multimodal:C:SHARES": "label skew: groups of clients, of these SHARES (0.8,0.2), with groups of classes and unimodal:C in each",
    "quantity:BETA": "size skew: clients' sizes are a draw from Dirichlet(BETA), labels at random",
    "domain:K": "feature skew: K clients (1) for each domain of data that have domains, which share it at random",
}
"""The partitions that a spec can name, with one line for people."""


def is_place(name: str) -> bool:
    """Whether a data set is named by where it lies: a word with a slash, or with a dot or ``~`` in front."""
    return "/" in name or "\\" in name or name.startswith((".", "~"))


def unknown(name: str, local: Iterable[str] = ()) -> FedfillError:
    """The error for a data set that is nowhere.

    Args:
        name: What was asked for.
        local: What there is in the data folder.

    Returns:
        The error, to be raised.
    """
    if name and Path(name).exists():
        return FedfillError(
            f"data: '{name}' is unknown, and what lies here is named by its path: did you mean './{name}'?"
        )
    return FedfillError(f"data: '{name}' is unknown; {did_you_mean(name, {*DATASETS, *local})}")


def parse(spec: str) -> tuple[str, list[float]]:
    """A spec's name and numbers, checked as far as that goes without data.

    Args:
        spec: For example ``"iid"``, ``"dirichlet:0.5"`` or ``"multimodal:2:0.8,0.2"``.

    Returns:
        The name, and its numbers: none for ``iid``, perhaps none for ``domain``; for ``multimodal`` the classes per client
        and then the shares.

    Raises:
        FedfillError: Where the name is unknown, or a number missing, malformed or out of range.
    """
    name, colon, text = spec.strip().partition(":")
    known = [usage.partition(":")[0] for usage in PARTITIONS]
    if name not in known:
        raise FedfillError(f"partition: '{spec}' is unknown; {did_you_mean(name, known)}")
    if name == "iid" and colon:
        raise FedfillError(f"partition: 'iid' takes no number, but '{spec}' was given")
    if name == "iid" or (name == "domain" and not colon):
        return name, []
    whole = name not in ("dirichlet", "quantity")
    things = "clients for each domain" if name == "domain" else "classes"
    what = f"a whole number of {things}, 1 or more" if whole else "a number above 0"
    text, colon, rest = text.partition(":") if name == "multimodal" else (text, "", "")
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        found = f"'{spec}' has '{text}'" if text else f"'{spec}' has none"
        example = f"{name}:{2 if whole else 0.5}"
        raise FedfillError(f"partition: '{name}' needs {what}, such as '{example}', but {found}") from None
    if not (0 < number < math.inf):
        raise FedfillError(f"partition: '{name}' needs {what}, but '{spec}' has {text}")
    try:
        shares = [float(share) for share in rest.split(",")] if colon else []
    except ValueError:
        raise FedfillError(
            f"partition: '{name}' takes shares of the clients, such as '{name}:2:0.8,0.2', but '{spec}' has '{rest}'"
        ) from None
    return name, [number, *shares]
