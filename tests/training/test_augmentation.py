"""Augmentation: each operation against Pillow's or a slow loop, draws over many images, and what is refused."""

from __future__ import annotations

import colorsys
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from tests.helpers import refused
from torch import Tensor
from torch.nn import functional

from fedfill.data.samples import normalise
from fedfill.streams import torch_stream
from fedfill.training.augmentation import (
    Augmentation,
    _colours,
    _cropped,
    _cut,
    _operate,
    _recoloured,
    _shifted,
    _turned,
    _warped,
    _windows,
    augmented,
    require,
    strong,
    weak,
)  # fmt: skip

OPERATIONS = (
    "auto-contrast", "brightness", "contrast", "posterise", "sharpness", "solarise",
    "rotation", "shear-x", "shear-y", "translate-x", "translate-y", "identity",
)  # fmt: skip


def stream(*name: str | int) -> torch.Generator:
    return torch_stream(0, "augmentation", *name)


def pixels(n: int, *shape: int) -> Tensor:
    return torch.randint(20, 200, (n, *shape), generator=stream("pixels"), dtype=torch.uint8)


def shifted_slowly(image: Tensor, down: int, right: int, flipped: bool) -> Tensor:
    """One image ``[c, h, w]``, by padding and cropping."""
    height, width = image.shape[1:]
    image = image.flip(2) if flipped else image
    padded = functional.pad(image, (2, 2, 2, 2), mode="reflect")
    return padded[:, 2 - down : 2 - down + height, 2 - right : 2 - right + width]


# weak


def test_translation_by_hand() -> None:
    image = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
    right = _shifted(image, torch.tensor([0]), torch.tensor([1]), torch.tensor([False]))
    assert right.tolist() == [[[[2, 1, 2], [5, 4, 5]]]]
    up = _shifted(image, torch.tensor([-1]), torch.tensor([0]), torch.tensor([True]))
    assert up.tolist() == [[[[6, 5, 4], [3, 2, 1]]]]


def test_translation_is_that_of_a_slow_loop() -> None:
    cases = list(product((-2, 0, 1), (-1, 0, 2), (False, True)))
    images = torch.randn(len(cases), 3, 5, 7, generator=stream("images"))
    down, right, flipped = (torch.tensor(column) for column in zip(*cases, strict=True))
    moved = _shifted(images, down, right, flipped)
    for image, out, case in zip(images, moved, cases, strict=True):
        assert torch.equal(out, shifted_slowly(image, *case))


@pytest.mark.parametrize("flip", [False, True])
def test_every_weak_outcome_comes_equally_often_and_no_other(flip: bool) -> None:
    image = torch.randn(2, 8, 16, generator=stream("image"))
    outcomes = list(product((-1, 0, 1), (-2, -1, 0, 1, 2), (False, True) if flip else (False,)))
    known = {shifted_slowly(image, *case).numpy().tobytes(): case for case in outcomes}
    assert len(known) == len(outcomes)
    n = 6000
    found = Counter(
        known[out.numpy().tobytes()] for out in weak(image.expand(n, -1, -1, -1), stream("draws", int(flip)), flip)
    )
    expected = n / len(outcomes)
    assert set(found) == set(outcomes)
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in found.values())


def test_small_images_are_not_moved() -> None:
    images = torch.randn(9, 1, 4, 4, generator=stream("small"))
    assert torch.equal(weak(images, stream(), False), images)


# operations


def pillow(operation: Callable[[Image.Image], Image.Image], image: Tensor) -> Tensor:
    """What Pillow makes of one image ``[c, h, w]`` uint8, normalised."""
    array = image.permute(1, 2, 0).numpy()
    made = np.array(operation(Image.fromarray(array[:, :, 0] if len(image) == 1 else array)))
    return normalise(torch.from_numpy(made if made.ndim == 3 else made[:, :, None]).permute(2, 0, 1))


def apply(name: str, images: Tensor, u: float) -> Tensor:
    n = len(images)
    return _operate(images, torch.full((n,), OPERATIONS.index(name)), torch.full((n,), u))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "u", "operation"),
    [
        ("auto-contrast", 0.3, ImageOps.autocontrast),
        ("brightness", 0.5, lambda image: ImageEnhance.Brightness(image).enhance(0.5)),
        ("brightness", 0.0, lambda image: ImageEnhance.Brightness(image).enhance(0.05)),
        ("posterise", 0.1, lambda image: ImageOps.posterize(image, 4)),
        ("posterise", 0.5, lambda image: ImageOps.posterize(image, 6)),
        ("posterise", 0.99, lambda image: image),
        ("sharpness", 0.0, lambda image: ImageEnhance.Sharpness(image).enhance(0.05)),
        ("sharpness", 1.0, lambda image: ImageEnhance.Sharpness(image).enhance(0.95)),
        ("solarise", 0.4, lambda image: ImageOps.solarize(image, round(0.4 * 255))),
    ],
)
def test_operations_on_pixels_are_pillows(channels: int, name: str, u: float, operation: Any) -> None:
    images = pixels(3, channels, 6, 9)
    found = apply(name, normalise(images), u)
    expected = torch.stack([pillow(operation, image) for image in images])
    if name == "sharpness":  # Pillow leaves the border as it is
        found, expected = found[:, :, 1:-1, 1:-1], expected[:, :, 1:-1, 1:-1]
    near = 1.6 / 127.5 if name != "posterise" else 1e-5  # Pillow rounds to whole levels, sharpness twice
    assert float((found - expected).abs().max()) < near


def test_contrast_by_hand() -> None:
    image = torch.tensor([[[[1.0, -1.0], [0.5, 0.5]]]])  # mean 0.25, half of it left
    assert apply("contrast", image, 0.5).flatten().tolist() == [0.625, -0.375, 0.375, 0.375]


def test_sharpness_at_the_border_by_hand() -> None:
    image = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    blurred = (9 / 4 + 4) / 13
    found = apply("sharpness", image, 0.5)[0, 0, 0, 0].item()
    assert found == pytest.approx((1 + blurred) / 2)


def test_auto_contrast_leaves_a_channel_of_one_value() -> None:
    image = torch.stack([torch.full((2, 2), 0.3), torch.tensor([[0.0, 0.5], [0.25, 0.5]])])[None]
    found = apply("auto-contrast", image, 0.5)[0]
    assert torch.equal(found[0], image[0, 0])
    assert found[1].tolist() == [[-1, 1], [0, 1]]


def warped_slowly(image: Tensor, forward: np.ndarray[Any, Any], right: float, down: float) -> Tensor:
    """One image ``[h, w]`` by a 2x2 matrix on (x, y) from its middle, then a translation; bilinear, 0 outside."""
    height, width = image.shape
    back = np.linalg.inv(forward)
    out = torch.zeros(height, width)
    for row, column in product(range(height), range(width)):
        x, y = back @ (column - (width - 1) / 2 - right, row - (height - 1) / 2 - down)
        x, y = x + (width - 1) / 2, y + (height - 1) / 2
        for i, j in product(range(height), range(width)):
            out[row, column] += max(0, 1 - abs(x - j)) * max(0, 1 - abs(y - i)) * image[i, j]
    return out


def test_movements_are_those_of_a_slow_loop() -> None:
    image = torch.rand(6, 9, generator=stream("movements"))
    angle, identity = math.radians(20), np.eye(2)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    cases = [
        ([angle, 0, 0, 0, 0], turn, 0.0, 0.0),
        ([0, 0.25, 0, 0, 0], np.array([[1, 0.25], [0, 1]]), 0.0, 0.0),
        ([0, 0, -0.3, 0, 0], np.array([[1, 0], [-0.3, 1]]), 0.0, 0.0),
        ([0, 0, 0, 0.2, 0], identity, 0.2 * 9, 0.0),
        ([0, 0, 0, 0, -0.15], identity, 0.0, -0.15 * 6),
    ]
    found = _warped(image.expand(5, 2, -1, -1), torch.tensor([case[0] for case in cases], dtype=torch.float32))
    for out, (_, forward, right, down) in zip(found, cases, strict=True):
        assert torch.allclose(out[0], warped_slowly(image, forward, right, down), atol=2e-5)
        assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("side", [7, 8])
def test_rotation_by_a_right_angle_and_translation_by_whole_pixels(side: int) -> None:
    images = torch.rand(3, 2, side, side, generator=stream("square")) * 2 - 1
    amounts = torch.zeros(3, 5)
    amounts[0, 0], amounts[1, 0], amounts[2, 3] = math.pi / 2, -math.pi / 2, 2 / side
    turned = _warped(images, amounts)
    assert torch.allclose(turned[0], images[0].rot90(-1, (1, 2)), atol=1e-5)  # clockwise
    assert torch.allclose(turned[1], images[1].rot90(1, (1, 2)), atol=1e-5)
    assert torch.allclose(turned[2, :, :, 2:], images[2, :, :, :-2], atol=1e-5)
    assert torch.allclose(turned[2, :, :, :2], torch.zeros(2, side, 2), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "column", "largest"),
    [
        ("rotation", 0, math.radians(30)), ("shear-x", 1, 0.3), ("shear-y", 2, 0.3),
        ("translate-x", 3, 0.3), ("translate-y", 4, 0.3),
    ],
)  # fmt: skip
def test_movements_have_either_sign(name: str, column: int, largest: float) -> None:
    images = torch.rand(2, 1, 8, 8, generator=stream("signs"))
    for u, share in ((0.0, -1.0), (0.75, 0.5), (1.0, 1.0)):
        amounts = torch.zeros(2, 5)
        amounts[:, column] = share * largest
        assert torch.allclose(apply(name, images, u), _warped(images, amounts), atol=1e-5)
    assert torch.allclose(apply(name, images, 0.5), images, atol=1e-5)


def test_each_image_has_its_own_operation() -> None:
    images = normalise(pixels(36, 3, 8, 8))
    u = torch.rand(36, generator=stream("u"))
    kinds = torch.randperm(36, generator=stream("kinds")) % 12
    before = images.clone()
    together = _operate(images, kinds, u)
    alone = [_operate(images[i : i + 1], kinds[i : i + 1], u[i : i + 1]) for i in range(36)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)
    assert torch.equal(images, before)
    changed = (together != images).flatten(1).any(1)
    assert not changed[kinds == OPERATIONS.index("identity")].any()
    assert changed[kinds != OPERATIONS.index("identity")].float().mean() > 0.9


# Cutout


def test_cutout_by_hand_and_by_a_slow_loop() -> None:
    cases = [(0, 2, 2), (1, 0, 0), (2, 0, 4), (3, 2, 3), (3, 4, 6), (2, 1, 1)]  # side, row, column
    images = torch.ones(len(cases), 2, 5, 7)
    found = _cut(images, *(torch.tensor(column) for column in zip(*cases, strict=True)))
    areas = [0, 1, 1 * 2, 9, 2 * 2, 4]  # what lies beyond the border is cut off
    assert [(out[0] == 0).sum().item() for out in found] == areas
    for out, (side, row, column) in zip(found, cases, strict=True):
        expected = torch.ones(2, 5, 7)
        for i, j in product(range(side), range(side)):
            y, x = row - side // 2 + i, column - side // 2 + j
            if 0 <= y < 5 and 0 <= x < 7:
                expected[:, y, x] = 0
        assert torch.equal(out, expected)


def test_strong_augmentation_cuts_squares_of_up_to_half_the_side() -> None:
    images = torch.full((3000, 1, 8, 12), 0.5)
    cut = (strong(images, stream("cut"), True, operations=0) == 0)[:, 0]  # [n, 8, 12]
    heights, widths = cut.any(2).sum(1), cut.any(1).sum(1)
    assert torch.equal(cut.sum((1, 2)), heights * widths)
    assert (int(heights.max()), int(widths.max())) == (4, 4)
    assert abs(float((heights == 0).float().mean()) - 1 / 5) < 0.04  # sides 0 to 4
    assert (cut.float().mean(0) > 0.02).all()  # everywhere
    assert torch.unique(strong(images, stream("cut"), True, operations=0)).tolist() == [0, 0.5]


# strong


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 12), (1, 2, 3)])
@pytest.mark.parametrize("operations", [1, 2, 4])
def test_strong_augmentation_keeps_shape_and_range(shape: tuple[int, ...], operations: int) -> None:
    images = normalise(torch.randint(0, 256, (200, *shape), generator=stream("range"), dtype=torch.uint8))
    out = strong(images, stream("strong"), False, operations)
    assert out.shape == images.shape
    assert out.dtype == torch.float32
    assert -1 <= float(out.min()) <= float(out.max()) <= 1  # and nothing is NaN
    assert (out != images).flatten(1).any(1).float().mean() > 0.8


@pytest.mark.parametrize(("operations", "share"), [(0, 1.0), (1, 0.118), (2, 0.014)])
def test_operations_are_drawn_with_the_same_probability_each_time(operations: int, share: float) -> None:
    image = pixels(1, 1, 8, 8)
    values = normalise(image).flatten()
    n = 1000
    out = strong(normalise(image).expand(n, -1, -1, -1), stream("kinds"), True, operations).flatten(1)  # [n, 64]
    # translation, flip and Cutout bring no new value but 0; of twelve operations the identity brings none either, nor do
    # posterise with 8 of 4 to 8 bits and solarise above the brightest value
    unused = 1 - (int(image.max()) / 255)
    assert (1 + 1 / 5 + unused) / 12 == pytest.approx(0.118, abs=0.001)
    new = ((out[:, :, None] - values).abs().amin(2) > 1e-4) & (out != 0)
    assert abs(float((~new).all(1).float().mean()) - share) < 4 * math.sqrt(share * (1 - share) / n) + 1e-9


# crops and colours


def test_a_window_of_the_whole_image_is_the_image() -> None:
    images = torch.randn(3, 2, 5, 7, generator=stream("images"))
    whole = torch.ones(3, 2), torch.zeros(3, 2)
    torch.testing.assert_close(_cropped(images, *whole), images, atol=1e-5, rtol=0)


def test_a_window_by_hand() -> None:
    """The right half of a row of four, brought to four pixels: centres at 2.25, 2.75, 3.25 and 3.75 pixels from the left edge."""
    row = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(1, 1, 4, 4)
    found = _cropped(row, torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 0.25]]))
    torch.testing.assert_close(found[0, 0, 1], torch.tensor([1.75, 2.25, 2.75, 3.0]))
    found = _cropped(row.transpose(2, 3), torch.tensor([[0.5, 1.0]]), torch.tensor([[-0.25, 0.0]]))
    torch.testing.assert_close(found[0, 0, :, 1], torch.tensor([0.0, 0.25, 0.75, 1.25]))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 48)])
def test_windows_lie_inside_and_have_the_areas_and_proportions_that_are_said(shape: tuple[int, ...]) -> None:
    n = 20_000
    sizes, centres = _windows(torch.empty(n, *shape), stream("windows"))
    assert float((centres.abs() + sizes / 2).max()) <= 0.5 + 1e-6
    assert sizes.max() <= 1
    within = (sizes < 1).all(1)
    areas, ratios = sizes.prod(1)[within], (sizes[:, 1] / sizes[:, 0])[within]
    assert 0.7 - 1e-5 <= areas.min() < 0.705
    assert areas.max() > 0.95
    assert 0.75 - 1e-5 <= ratios.min() < 0.78
    assert 1.28 < ratios.max() <= 4 / 3 + 1e-5
    for column in centres.unbind(1):  # no side is preferred
        assert abs(float(column.mean())) < 4 * float(column.std()) / math.sqrt(n)
    assert independent(centres)
    assert independent(torch.stack([areas, ratios.log()], 1))


def independent(columns: Tensor) -> bool:
    """Whether no two of the columns ``[n, k]`` are correlated."""
    apart = columns.T.corrcoef() - torch.eye(columns.shape[1])
    return float(apart.abs().max()) < 4 / math.sqrt(len(columns))


def test_crops_stay_within_the_values_of_their_image() -> None:
    """Bilinear weights may add up to a little more than 1, as they do on sides of 30."""
    for value in (-1.0, 1.0):
        images = torch.full((50, 1, 30, 30), value)
        assert torch.equal(augmented(images, "crop", stream("flat")), images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("which", "factor"), list(product((0, 1, 2), (0.7, 1.0, 1.3))))
def test_factors_of_colours_are_pillows(channels: int, which: int, factor: float) -> None:
    kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which]
    stored = pixels(4, channels, 6, 5)
    changes = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(4, 1)
    changes[:, which] = factor
    found = _recoloured(normalise(stored), changes, torch.zeros(4, dtype=torch.bool))
    for image, out in zip(stored, found, strict=True):
        data = image[0].numpy() if channels == 1 else image.permute(1, 2, 0).numpy()
        expected = torch.from_numpy(np.array(kind(Image.fromarray(data)).enhance(factor))).reshape(6, 5, channels)
        # Pillow rounds the grey and the result to whole levels
        assert (((out.permute(1, 2, 0) + 1) * 127.5) - expected).abs().max() < 2.1


def test_hues_are_those_of_colorsys() -> None:
    images = torch.rand(6, 3, 4, 4, generator=stream("hues"))
    images[0, :, 0, 0] = 0.5  # grey
    images[0, :, 0, 1] = torch.tensor([0.8, 0.8, 0.1])  # two largest
    turns = torch.tensor([-0.3, -0.1, 0.0, 0.05, 0.2, 1 / 3])
    found = _turned(images, turns[:, None, None, None])
    for image, turn, out in zip(images, turns, found, strict=True):
        for pixel, turned in zip(image.flatten(1).T.tolist(), out.flatten(1).T.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*pixel)
            assert turned == pytest.approx(colorsys.hsv_to_rgb((h + float(turn)) % 1, s, v), abs=1e-5)


def recoloured_slowly(image: Tensor, changes: list[float], grey: bool) -> Tensor:
    """One image ``[3, h, w]``, pixel by pixel in 0..1: brightness, contrast, saturation, hue, grey."""
    brightness, contrast, saturation, turn = changes
    rows = [[c * brightness for c in pixel] for pixel in ((image + 1) / 2).flatten(1).T.tolist()]
    rows = [[min(c, 1.0) for c in pixel] for pixel in rows]
    mean = sum(luma(pixel) for pixel in rows) / len(rows)
    rows = [[min(max(mean + (c - mean) * contrast, 0.0), 1.0) for c in pixel] for pixel in rows]
    rows = [[min(max(luma(pixel) + (c - luma(pixel)) * saturation, 0.0), 1.0) for c in pixel] for pixel in rows]
    for k, pixel in enumerate(rows):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        rows[k] = list(colorsys.hsv_to_rgb((h + turn) % 1, s, v))
    if grey:
        rows = [[luma(pixel)] * 3 for pixel in rows]
    return torch.tensor(rows).T.reshape(image.shape) * 2 - 1


def luma(pixel: list[float]) -> float:
    return 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]


def test_colours_change_as_in_a_slow_loop_and_in_the_order_that_is_said() -> None:
    images = normalise(torch.randint(0, 256, (6, 3, 4, 5), generator=stream("bright"), dtype=torch.uint8))
    changes, _ = _colours(images, stream("changes"))
    changes[0] = torch.tensor([1.3, 1.3, 1.3, 0.3])
    grey = torch.tensor([False, False, False, False, True, True])
    found = _recoloured(images, changes, grey)
    slowly = [recoloured_slowly(*each) for each in zip(images, changes.tolist(), grey.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.stack(slowly), atol=1e-5, rtol=0)


def test_one_image_in_ten_loses_its_colours() -> None:
    n = 4000
    changes, grey = _colours(torch.empty(n, 3, 1, 1), stream("colours"))
    assert abs(float(grey.float().mean()) - 0.1) < 4 * math.sqrt(0.09 / n)
    assert float(changes[:, :3].min()) >= 0.7
    assert float(changes[:, :3].max()) <= 1.3
    assert -0.3 <= float(changes[:, 3].min()) < -0.29
    assert 0.29 < float(changes[:, 3].max()) <= 0.3
    assert independent(torch.cat([changes, grey.float()[:, None]], 1))
    images = normalise(pixels(n, 3, 2, 2))
    found = _recoloured(images, changes, grey)
    assert torch.equal((found.amax(1) - found.amin(1) < 1e-6).all(2).all(1), grey)


BY_HAND: dict[Augmentation, Callable[[Tensor, torch.Generator], Tensor]] = {
    "shift": lambda images, generator: weak(images, generator, False),
    "shift_flip": lambda images, generator: weak(images, generator, True),
    "crop": lambda images, generator: _cropped(images, *_windows(images, generator)),
    "crop_colour": lambda images, generator: _recoloured(
        _cropped(images, *_windows(images, generator)), *_colours(images, generator)
    ),
}


@pytest.mark.parametrize("kind", get_args(Augmentation))
@pytest.mark.parametrize("shape", [(1, 30, 9), (3, 8, 8)])
def test_every_kind_is_what_its_name_says(kind: Augmentation, shape: tuple[int, ...]) -> None:
    images = normalise(torch.randint(0, 256, (60, *shape), generator=stream("images"), dtype=torch.uint8))
    found = augmented(images, kind, stream(kind))
    assert torch.equal(found, BY_HAND[kind](images, stream(kind)))
    assert found.shape == images.shape
    assert found.min() >= -1
    assert found.max() <= 1
    assert sum(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found, images, strict=True)) > 45


def test_what_cannot_be_augmented_gives_a_sentence() -> None:
    with refused("augmentation", "crop", "[9]"):
        require(torch.zeros(1, 9), "crop")
    with refused("augmentation", "crop_colour", "torch.float32"):
        require(torch.zeros(1, 3, 8, 8), "crop_colour")
    with refused("augmentation", "shift", "9 x 7", "crop"):
        require(torch.zeros(1, 3, 9, 7), "shift")
    for kind in ("shift", "shift_flip", "crop"):
        require(torch.zeros(1, 3, 8, 8), kind)


# all


ALL = [
    weak,
    strong,
    *(lambda images, generator, flip, kind=kind: augmented(images, kind, generator) for kind in get_args(Augmentation)),
]


@pytest.mark.parametrize("augment", ALL)
def test_results_follow_the_passed_generator_alone(augment: Callable[..., Tensor]) -> None:
    images = normalise(pixels(20, 3, 8, 8))
    before, state = images.clone(), torch.get_rng_state()
    first = augment(images, stream(1), True)
    assert torch.equal(first, augment(images, stream(1), True))
    assert not torch.equal(first, augment(images, stream(2), True))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert augment(images[:0], stream(1), True).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("shape", [(5, 64), (5,), (5, 8, 8), (5, 1, 1, 8, 8)])
@pytest.mark.parametrize("augment", ALL)
def test_what_is_no_image_gives_a_sentence(augment: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    with refused("data", "[n, channels, height, width]") as error:
        augment(torch.zeros(shape), stream(), False)
    assert str(list(shape[1:])) in str(error.value)
