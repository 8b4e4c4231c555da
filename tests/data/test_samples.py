"""Samples: what can be joined, and what bytes and floats mean."""

from __future__ import annotations

import pytest
import torch

from fedfill.data.samples import Samples, draw, normalise, quantise


def images(n: int, dtype: torch.dtype = torch.uint8, shape: tuple[int, ...] = (1, 2, 2)) -> Samples:
    return Samples(torch.full((n, *shape), n).to(dtype), torch.full((n,), n))


def test_joined_in_order() -> None:
    joined = images(2) + images(1)
    assert joined.labels.tolist() == [2, 2, 1]
    assert joined.inputs[:, 0, 0, 0].tolist() == [2, 2, 1]
    assert joined.inputs.dtype == torch.uint8
    first = images(2)
    assert first + None is first
    assert len(images(0) + images(3)) == 3


@pytest.mark.parametrize(
    "other", [images(1, torch.float32), images(1, shape=(3, 2, 2)), images(1, shape=(4,)), images(0, torch.float32)]
)
def test_unlike_samples_are_not_joined(other: Samples) -> None:
    # torch would make floats 0..255 of the bytes without a word, and they would pass `normalise` as they are
    for one, two in ((images(2), other), (other, images(2))):
        with pytest.raises(ValueError, match="can't be joined"):
            _ = one + two


def test_bytes_and_floats() -> None:
    every = torch.arange(256).to(torch.uint8)
    scaled = normalise(every)
    assert (scaled[0].item(), scaled[255].item()) == (-1, 1)
    assert torch.equal(quantise((scaled + 1) / 2), every)
    floats = torch.tensor([-3.0, 300.0])
    assert torch.equal(normalise(floats), floats)
    assert normalise(floats).data_ptr() != floats.data_ptr()  # a network may work in place
    assert quantise(torch.tensor([-0.1, 0.5, 1.1])).tolist() == [0, 128, 255]


def test_drawn_samples_keep_their_labels_and_all_come_equally_often() -> None:
    data = Samples(torch.arange(0, 250, 50, dtype=torch.uint8)[:, None], torch.arange(5))
    inputs, labels = draw(data, 5000, torch.Generator().manual_seed(0))
    assert torch.equal(inputs, normalise(data.inputs)[labels])
    assert (torch.bincount(labels) - 1000).abs().max() < 120  # more than four standard deviations
    assert torch.equal(labels, draw(data, 5000, torch.Generator().manual_seed(0))[1])
