"""What many tests share: small samples and federations built in memory."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings

from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.streams import torch_stream

settings.register_profile("fedfill", deadline=None)  # machines that run tests are shared, so times mean nothing
settings.load_profile("fedfill")
# a shell's background job ignores Ctrl-C, and so would every process that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# a console that is made while COLUMNS is set, as in processes of pytest-xdist, keeps that width; tests set their own
os.environ.pop("COLUMNS", None)
importlib.import_module("fedfill.cli.terminal")
torch.set_num_threads(1)  # tensors here are tiny: waking more threads costs more than they bring
gc.disable()  # what imports and the collection of tests make stays, and looking through it again and again takes long


def pytest_collection_finish() -> None:
    """From here on garbage is looked for in what tests make, and no longer in all that was there before them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _random_samples(n: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = 3, seed: int = 0) -> Samples:
    stream = torch_stream(seed, "test samples", n)
    images = torch.randint(0, 256, (n, *shape), generator=stream, dtype=torch.uint8)
    return Samples(images, torch.randint(0, classes, (n,), generator=stream))


def _make_federation(
    train: Sequence[Samples], own: Sequence[Samples] | None = None, test: Samples | None = None, classes: int = 3
) -> Federation:
    own = own or [samples[:0] for samples in train]
    clients = tuple(ClientData(mine, held) for mine, held in zip(train, own, strict=True))
    names = tuple(f"class {c}" for c in range(classes))
    return Federation("tiny", clients, train[0] if test is None else test, names, (), "no fingerprint")


@pytest.fixture(scope="session")
def random_samples() -> Callable[..., Samples]:
    """A function (n, shape, classes, seed) -> uint8 images of noise with random labels."""
    return _random_samples


@pytest.fixture(scope="session")
def make_federation() -> Callable[..., Federation]:
    """A function (clients' samples, their own test splits, test set, classes) -> federation."""
    return _make_federation
