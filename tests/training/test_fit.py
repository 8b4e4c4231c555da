"""Local training: numbers worked by hand, budgets, what is left out, and independence from what a worker did before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfill.data.samples import Samples, normalise
from fedfill.errors import ContractError, FedfillError
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part, weights_of
from fedfill.streams import torch_stream
from fedfill.training import fit as local
from fedfill.training.fit import Batch, Context, Fit, Fitted, Interrupted, LocalTraining, Resident, batches, fit
from fedfill.training.losses import cross_entropy
from fedfill.tree import Weights

CPU = torch.device("cpu")


def entropy(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    return cross_entropy(model, batch)


def squares(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    return ((model(batch.inputs)[:, 0] - batch.labels) ** 2).mean()


def train(
    resident: Resident,
    weights: Weights,
    data: Samples,
    loss: Any = entropy,
    *,
    draw: int | None = None,
    name: str = "x",
    **training: Any,
) -> Fitted:
    return fit(
        resident,
        Fit(weights, loss, data, LocalTraining(**training), draw),
        torch_stream(0, name),
        torch_stream(0, name, "draws"),
    )


def line(weight: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


POINTS = Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4]))


@given(st.integers(0, 60), st.integers(1, 12))
def test_batches_cover_each_position_once(n: int, batch_size: int) -> None:
    order = torch.randperm(n, generator=torch_stream(n, "order"))
    parts = list(batches(order, batch_size))
    assert torch.equal(torch.cat([order[:0], *parts]), order)
    sizes = [len(p) for p in parts]
    assert all(size == batch_size for size in sizes[:-1])
    if n > 1 and batch_size > 1:
        assert all(2 <= size <= batch_size + 1 for size in sizes)


@pytest.mark.parametrize(
    ("n", "batch_size", "expected"),
    [(0, 4, []), (1, 4, [1]), (4, 4, [4]), (5, 4, [5]), (6, 4, [4, 2]), (9, 4, [4, 5]), (3, 2, [3]), (3, 1, [1, 1, 1])],
)
def test_a_last_single_sample_joins_the_batch_before(n: int, batch_size: int, expected: list[int]) -> None:
    assert [len(p) for p in batches(torch.arange(n), batch_size)] == expected


# w = 1, points (1, 3) and (2, 4): errors -2 and -2, gradient (2*-2*1 + 2*-2*2) / 2 = -6, loss 4.
# A step of 1/4 gives w = 2.5: errors -1/2 and 1, gradient (-1 + 4) / 2 = 3/2, loss 5/8.
@pytest.mark.parametrize(
    ("training", "weight", "loss"),
    [
        ({"epochs": 1}, 2.5, 4.0),
        ({"epochs": 2}, 2.5 - 1.5 / 4, (4 + 0.625) / 2),
        ({"epochs": 2, "momentum": 0.5}, 2.5 - (1.5 - 6 / 2) / 4, (4 + 0.625) / 2),
        ({"epochs": 1, "weight_decay": 2.0}, 1 - (-6 + 2 * 1) / 4, 4.0),
        ({"steps": 1, "epochs": 7}, 2.5, 4.0),
        ({"steps": 0, "epochs": 7}, 1.0, 0.0),
    ],
)
def test_sgd_by_hand(training: dict[str, Any], weight: float, loss: float) -> None:
    weights = weights_of(line())
    fitted = train(
        Resident(line(9.0), CPU, False), weights, POINTS, squares, optimizer="sgd", learning_rate=0.25, **training
    )
    assert fitted.weights["weight"].item() == weight
    assert fitted.loss == loss
    assert fitted.steps == training.get("steps", training["epochs"])
    assert fitted.samples == 2 * fitted.steps
    assert weights["weight"].item() == 1.0  # the start is untouched


def test_single_samples_in_either_order_by_hand() -> None:
    # point (1, 3) first: 1 -> 1 + 4/4 = 2, and (2, 4) then fits exactly; the other way round 1 -> 1 + 8/4 = 3, and stays
    resident = Resident(line(), CPU, False)
    ends = [
        train(
            resident,
            weights_of(line()),
            POINTS,
            squares,
            name=f"{k}",
            optimizer="sgd",
            learning_rate=0.25,
            batch_size=1,
        )
        for k in range(20)
    ]
    assert {fitted.weights["weight"].item() for fitted in ends} == {2.0, 3.0}


@pytest.mark.parametrize(("optimizer", "weight"), [("adam", 1.5), ("adamw", 1 - 0.5 * 0.1 + 0.5)])
def test_the_first_step_of_adam_is_the_learning_rate(optimizer: str, weight: float) -> None:
    fitted = train(
        Resident(line(), CPU, False), weights_of(line()), POINTS, squares,
        optimizer=optimizer, learning_rate=0.5, weight_decay=0.1,
    )  # fmt: skip
    assert fitted.weights["weight"].item() == pytest.approx(weight, abs=1e-5)


class Recorder:
    """A loss that remembers what it was shown."""

    def __init__(self) -> None:
        self.labels: list[list[int]] = []
        self.steps: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        self.labels.append(batch.labels.tolist())
        self.steps.append(context.step)
        return squares(model, batch, context)


TEN = Samples(torch.arange(10.0)[:, None] / 10, torch.arange(10))


def record(**options: Any) -> tuple[Recorder, Fitted]:
    recorder = Recorder()
    fitted = train(
        Resident(line(), CPU, False), weights_of(line()), TEN, recorder, optimizer="sgd", learning_rate=0.01, **options
    )
    assert recorder.steps == list(range(fitted.steps))
    assert fitted.samples == sum(map(len, recorder.labels))
    return recorder, fitted


def test_epochs_see_every_sample_in_a_new_order() -> None:
    recorder, fitted = record(epochs=3, batch_size=4)
    assert [len(labels) for labels in recorder.labels] == [4, 4, 2] * 3
    epochs = [[*chain(*recorder.labels[k : k + 3])] for k in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (fitted.steps, fitted.samples) == (9, 30)


def test_steps_cut_the_last_epoch_short() -> None:
    recorder, fitted = record(steps=5, epochs=1, batch_size=4)
    assert [len(labels) for labels in recorder.labels] == [4, 4, 2, 4, 4]
    assert (fitted.steps, fitted.samples) == (5, 18)


def test_samples_per_epoch_are_drawn_without_replacement() -> None:
    recorder, fitted = record(epochs=40, batch_size=3, draw=5)
    assert [len(labels) for labels in recorder.labels] == [3, 2] * 40
    epochs = [set(recorder.labels[k] + recorder.labels[k + 1]) for k in range(0, 80, 2)]
    assert all(len(epoch) == 5 for epoch in epochs)
    assert set.union(*epochs) == set(range(10))
    assert fitted.samples == 200


def test_more_samples_per_epoch_than_there_are_means_all() -> None:
    recorder, fitted = record(epochs=1, batch_size=20, draw=50)
    assert sorted(recorder.labels[0]) == list(range(10))
    assert fitted.samples == 10


def test_without_samples_nothing_is_done() -> None:
    for budget in ({"epochs": 2}, {"steps": 3}):
        fitted = train(Resident(line(), CPU, False), weights_of(line(2.0)), POINTS[:0], squares, **budget)
        assert (fitted.weights["weight"].item(), fitted.steps, fitted.samples, fitted.loss) == (2.0, 0, 0, 0.0)


@pytest.mark.parametrize("draw", [0, -1])
def test_no_samples_per_epoch_ends_or_is_refused(draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Exception):
        pass

    epochs = iter(range(100))

    def counted(order: Tensor, batch_size: int) -> Iterator[Tensor]:
        if next(epochs, None) is None:
            raise Endless  # in place of a test that never ends
        return batches(order, batch_size)

    def unwanted(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        raise AssertionError("trained on samples that were not asked for")

    monkeypatch.setattr(local, "batches", counted)
    try:
        fitted = train(Resident(line(), CPU, False), weights_of(line()), POINTS, unwanted, draw=draw, steps=2)
    except (ValueError, ContractError, FedfillError):
        return
    assert fitted.steps == 0


def two_parts() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 2)})


def data(n: int, seed: int = 0) -> Samples:
    stream = torch_stream(seed, "data")
    return Samples(torch.randn(n, 2, generator=stream), torch.randint(0, 2, (n,), generator=stream))


def test_what_is_left_out_is_poisoned_and_not_returned() -> None:
    model = two_parts()
    resident = Resident(model, CPU, False)
    weights = part(weights_of(model), "body")
    seen: list[dict[str, bool]] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        state = model.state_dict()
        seen.append({name: bool(t.isnan().all()) for name, t in state.items() if t.is_floating_point()})
        assert context.received is weights
        return functional_loss(model["body"](batch.inputs), batch.labels)  # type: ignore[index]

    functional_loss = nn.functional.cross_entropy
    fitted = train(resident, weights, data(6), loss)
    assert list(fitted.weights) == list(weights) == ["body.weight", "body.bias"]
    assert seen == [{name: not name.startswith("body.") for name in seen[0]}]
    assert not torch.equal(fitted.weights["body.weight"], weights["body.weight"])
    assert all(bool(t.isfinite().all()) for t in fitted.weights.values())
    resident.load(weights_of(model))  # and a later client gets everything
    assert all(bool(t.isfinite().all()) for t in resident.tensors.values())


def test_a_loss_that_reads_what_was_left_out_is_nan() -> None:
    model = two_parts()

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return nn.functional.cross_entropy(model["head"](model["body"](batch.inputs)), batch.labels)  # type: ignore[index]

    assert torch.tensor(train(Resident(model, CPU, False), part(weights_of(model), "body"), data(6), loss).loss).isnan()


def test_a_name_that_is_not_the_models_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        Resident(line(), CPU, False).load({"nobody": torch.zeros(1)})


def test_the_returned_weights_are_new() -> None:
    resident = Resident(line(), CPU, False)
    weights = weights_of(line())
    first = train(resident, weights, POINTS, squares).weights["weight"]
    kept = first.clone()
    train(resident, weights_of(line(5.0)), POINTS, squares)
    assert torch.equal(first, kept)
    assert first.data_ptr() != weights["weight"].data_ptr()


def test_frozen_parameters_stay_and_are_returned() -> None:
    model = two_parts()
    model["head"].weight.requires_grad_(False)  # type: ignore[index]
    weights = weights_of(model)

    def loss(model: Any, batch: Batch, context: Context) -> Tensor:
        return nn.functional.cross_entropy(model["head"](model["norm"](model["body"](batch.inputs))), batch.labels)

    fitted = train(Resident(model, CPU, False), weights, data(6), loss, weight_decay=0.5, epochs=2)
    changed = {name for name in weights if not torch.equal(weights[name], fitted.weights[name])}
    assert set(weights) - changed == {"head.weight"}
    assert fitted.weights["norm.num_batches_tracked"].item() == 2


def dropping() -> nn.Module:
    """Convolution, batch norm and a user's own dropout."""
    torch.manual_seed(3)
    return with_streams(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Dropout2d(0.3),
            nn.Flatten(),
            nn.Linear(144, 3),
        )
    )


def equal(a: Fitted, b: Fitted) -> bool:
    return all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights) and (a.loss, a.steps) == (b.loss, b.steps)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equal_calls_give_equal_results_whatever_the_worker_did_before(
    optimizer: str, channels_last: bool, random_samples: Callable[..., Samples]
) -> None:
    model, mine, other = dropping(), random_samples(20), random_samples(33, seed=1)
    weights = weights_of(model)
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "momentum": 0.9,
        "epochs": 2,
        "batch_size": 8,
        "learning_rate": 0.01,
    }
    fresh = train(Resident(model, CPU, channels_last), weights, mine, **options)
    used = Resident(model, CPU, channels_last)
    stranger = train(used, weights_of(dropping().apply(_shift)), other, name="other", **options)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert equal(train(used, weights, mine, **options), fresh)
    used.model.eval()  # as a handler or an evaluation leaves it
    assert equal(train(used, weights, mine, **options), fresh)  # a fresh optimizer each time, and in training mode
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(stranger, fresh)
    assert not equal(train(used, weights, mine, name="y", **options), fresh)


def _shift(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.add_(0.1)


def test_leftover_counters_of_another_client_do_not_matter() -> None:
    """Batch norm that averages over all batches so far weighs them by its counter, an integer that can't be NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2))
    everything = weights_of(model)
    partial = {name: tensor for name, tensor in everything.items() if "num_batches" not in name}
    used = Resident(model, CPU, False)
    train(used, everything, data(40, seed=1), batch_size=4)
    assert equal(
        train(used, partial, data(12), batch_size=4),
        train(Resident(model, CPU, False), partial, data(12), batch_size=4),
    )


@pytest.mark.parametrize(("width", "shape"), [("paper", (1, 8, 8)), ("wide", (1, 8, 8)), ("paper", (3, 8, 8))])
def test_layouts_agree_closely(width: str, shape: tuple[int, ...], random_samples: Callable[..., Samples]) -> None:
    settings = ModelSettings(width=width, latent_activation="sigmoid")  # type: ignore[arg-type]
    model = build("auto", shape, 3, settings, seed=0)
    samples, weights = random_samples(24, shape), weights_of(model)
    plain, last = (
        train(
            Resident(model, CPU, layout), weights, samples, batch_size=8, epochs=2, optimizer="sgd", learning_rate=0.05
        )
        for layout in (False, True)
    )
    for name, tensor in plain.weights.items():
        assert last.weights[name].is_contiguous()
        torch.testing.assert_close(last.weights[name], tensor, rtol=1e-3, atol=1e-5)
    assert last.loss == pytest.approx(plain.loss, rel=1e-5)


def test_images_are_normalised() -> None:
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        seen.append(batch.inputs)
        return squares(nn.Sequential(nn.Flatten(), model), batch, context)

    images = Samples(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1), torch.tensor([0, 0]))
    train(Resident(line(), CPU, True), weights_of(line()), images, loss)
    assert sorted(seen[0].flatten().tolist()) == [-1.0, 1.0]
    assert seen[0].dtype == torch.float32


def test_stop_interrupts_at_the_next_batch() -> None:
    resident = Resident(line(), CPU, False)
    steps: list[int] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        steps.append(context.step)
        resident.stop = context.step == 2
        return squares(model, batch, context)

    with pytest.raises(Interrupted):
        train(resident, weights_of(line()), POINTS, loss, epochs=100)
    assert steps == [0, 1, 2]


def test_the_template_is_copied() -> None:
    model = line()
    before = copy.deepcopy(model.state_dict())
    train(Resident(model, CPU, True), weights_of(line(4.0)), POINTS, squares)
    assert torch.equal(model.weight, before["weight"])


def norm_of_one() -> nn.Sequential:
    """Batch norm of one number with running mean 1 and variance 4."""
    norm = nn.BatchNorm1d(1, eps=1e-12)
    norm.running_mean, norm.running_var = torch.tensor([1.0]), torch.tensor([4.0])
    return nn.Sequential(norm)


def first_output(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    """The output for the larger of two inputs."""
    return model(batch.inputs).max()


# inputs 3 and 7 are 1 and 3 by the running statistics, and -1 and 1 by their own (mean 5, variance 4, unbiased 8)
@pytest.mark.parametrize(
    ("buffers", "loss", "expected"),
    [
        ("frozen", 3.0, {"weight": 1 - 3 / 4, "bias": -1 / 4, "running_mean": 1.0, "running_var": 4.0}),
        (
            "average",
            1.0,
            {"weight": 1 - 1 / 4, "bias": -1 / 4, "running_mean": 0.9 + 0.1 * 5, "running_var": 0.9 * 4 + 0.1 * 8},
        ),
    ],
)
def test_buffers_by_hand(buffers: str, loss: float, expected: dict[str, float]) -> None:
    data = Samples(torch.tensor([[3.0], [7.0]]), torch.zeros(2, dtype=torch.int64))
    resident = Resident(norm_of_one(), CPU, False)
    for _ in range(2):  # whatever the worker did before
        fitted = train(
            resident, weights_of(norm_of_one()), data, first_output,
            optimizer="sgd", learning_rate=0.25, buffers=buffers,
        )  # fmt: skip
        assert fitted.loss == pytest.approx(loss)
        assert int(fitted.weights["0.num_batches_tracked"]) == (buffers == "average")
        assert {name: float(fitted.weights[f"0.{name}"]) for name in expected} == pytest.approx(expected)
        train(resident, weights_of(norm_of_one()), data, buffers="average" if buffers == "frozen" else "frozen")


def test_frozen_buffers_leave_other_layers_in_training_mode() -> None:
    modes: list[dict[str, bool]] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        modes.append({type(layer).__name__: layer.training for layer in model.children()})
        return entropy(model, batch, context)

    model = with_streams(
        nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    )
    resident = Resident(model, CPU, False)
    for buffers in ("frozen", "average"):
        train(resident, weights_of(model), data(6), loss, buffers=buffers)
    frozen, average = modes
    assert [name for name, training in frozen.items() if not training] == ["BatchNorm1d"]
    assert all(average.values())


def test_a_batch_knows_its_positions() -> None:
    inputs = torch.randn(11, 2, generator=torch_stream(0, "data"))
    samples = Samples(inputs, 10 * torch.arange(11))
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        assert torch.equal(batch.inputs, inputs[batch.index])
        assert torch.equal(batch.labels, 10 * batch.index)
        seen.append(batch.index)
        return model(batch.inputs).sum()

    train(Resident(nn.Linear(2, 1), CPU, False), weights_of(nn.Linear(2, 1)), samples, loss, epochs=2, batch_size=4)
    assert [len(index) for index in seen] == [4, 4, 3] * 2
    for epoch in (seen[:3], seen[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(11))


def test_draws_leave_the_order_of_batches_as_it_is() -> None:
    def orders(draws: int, dropout: float) -> tuple[list[list[int]], list[float]]:
        seen: list[list[int]] = []
        drawn: list[float] = []

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            seen.append(batch.index.tolist())
            drawn.extend(torch.rand(draws, generator=context.generator).tolist())
            return entropy(model, batch, context)

        model = with_streams(nn.Sequential(nn.Dropout(dropout), nn.Linear(2, 2)))
        train(Resident(model, CPU, False), weights_of(model), data(20), loss, epochs=3, batch_size=8, draw=12)
        return seen, drawn

    plain, _ = orders(0, 0.0)
    assert len({tuple(index) for index in plain}) == len(plain) == 6
    for draws, dropout in ((5, 0.0), (0, 0.5), (3, 0.5)):
        seen, drawn = orders(draws, dropout)
        assert seen == plain
        assert len(set(drawn)) == 6 * draws  # and no draw is made twice


def test_augmentation_changes_images_and_neither_their_labels_nor_their_number() -> None:
    def batches_of(training: dict[str, Any]) -> list[Batch]:
        seen: list[Batch] = []

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            seen.append(batch)
            return squares(nn.Sequential(nn.Flatten(), model), batch, context)

        model = nn.Linear(3 * 64, 1)
        resident = Resident(model, CPU, True)
        train(resident, weights_of(model), images, loss, batch_size=8, **training)
        return seen

    stream = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 3, 8, 8), generator=stream, dtype=torch.uint8)
    images = Samples(pixels, torch.arange(20))
    plain, augmented = batches_of({"epochs": 2}), batches_of({"epochs": 2, "augmentation": "crop_colour"})
    assert [batch.index.tolist() for batch in augmented] == [batch.index.tolist() for batch in plain]
    for batch in augmented:
        assert torch.equal(batch.labels, batch.index)
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
        assert not torch.allclose(batch.inputs, normalise(pixels[batch.index]), atol=0.01)
    # anew in each epoch
    first, second = (
        torch.cat([b.inputs for b in half])[torch.cat([b.index for b in half]).argsort()]
        for half in (augmented[:3], augmented[3:])
    )
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_to_train_is_refused() -> None:
    model = line()
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable parameter"):
        train(Resident(model, CPU, False), weights_of(model), POINTS, squares)
