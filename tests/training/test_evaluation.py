"""Evaluation: outcomes and shares by hand, and the same figures for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.helpers import gathered
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.training.evaluation import (
    CHUNK,
    FAIRNESS,
    Evaluation,
    Scored,
    Splits,
    fairness,
    gather,
    in_chunks,
    mean_loss,
    score,
    score_all,
    splits_of,
)
from fedfill.training.fit import Resident
from fedfill.tree import Weights

CPU = torch.device("cpu")


class Line(nn.Module):
    """Scores (factor * x, 0) through dropout and batch norm, which in evaluation leave them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.9)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(torch.cat([x * self.factor, torch.zeros_like(x)], 1)))


def test_score_by_hand() -> None:
    # scores (x, 0) with x = ln 3: softmax (3/4, 1/4); dropout is off, batch norm keeps its running statistics
    model = with_streams(Line())
    model.norm.eps = 0.0  # type: ignore[union-attr, assignment]
    resident = Resident(model, CPU, False)
    resident.model.train()
    before = {name: tensor.clone() for name, tensor in resident.tensors.items()}
    x = math.log(3)
    scored = score(resident, Samples(torch.tensor([[x], [x], [-x]]), torch.tensor([0, 1, 0])))
    assert scored.predicted.tolist() == [0, 0, 1]
    assert scored.losses.tolist() == pytest.approx([math.log(4 / 3), math.log(4), math.log(4)], abs=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in resident.tensors.items())


def labelled_splits(
    test: list[int], own: list[int], held: list[int], own_sizes: tuple[int, ...], held_sizes: tuple[int, ...]
) -> Splits:
    """Splits of which only labels and sizes matter."""
    labels = [torch.tensor(part, dtype=torch.int64) for part in (test, own, held)]
    first, second, third = (Samples(torch.zeros(len(part), 1), part) for part in labels)
    return Splits(first, second, third, own_sizes, held_sizes)


def test_summary_by_hand() -> None:
    # chunks that cross the borders of the splits: four samples of the test set, three of clients 0 and 2, two for validation
    chunks = [
        Scored(torch.tensor([0, 2, 0]), torch.tensor([0.5, 1.0, 2.5])),
        Scored(torch.tensor([2, 1, 0, 0, 1, 0]), torch.zeros(6)),
    ]
    result = gather(chunks, labelled_splits([0, 2, 2, 2], [0] * 3, [0] * 2, (2, 0, 1, 0), (0, 0, 1, 1)), 4)
    assert result == Evaluation(
        accuracy=0.75,
        loss=1.0,
        accuracy_by_class=[1.0, None, 2 / 3, None],
        accuracy_by_client=[0.5, None, 1.0, None],
        validation_by_client=[None, None, 0.0, 1.0],
        most_predicted=0.5,
        largest_class=0.75,
    )


def test_without_a_test_set_all_own_splits_together_are_one() -> None:
    chunks = [Scored(torch.tensor([0, 1, 0]), torch.tensor([3.0, 0.0, 0.0]))]
    result = gather(chunks, labelled_splits([], [1, 1, 0], [], (2, 1), (0, 0)), 2)
    assert result == Evaluation(2 / 3, 1.0, [1.0, 0.5], [0.5, 1.0], [], 2 / 3, 2 / 3)


def test_summary_where_no_client_has_a_test_split() -> None:
    one = Scored(torch.tensor([1]), torch.zeros(1))
    result = gather([one], labelled_splits([1], [], [], (0, 0, 0), (0, 0, 0)), 2)
    assert result.accuracy_by_class == [None, 1.0]
    assert result.accuracy_by_client == [None, None, None]


@pytest.fixture(scope="module")
def federation(random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]) -> Federation:
    """More than two chunks of test data, and test splits that cross the chunks' borders; the second client has none."""
    everything = random_samples(2 * CHUNK + 300)
    first, last = everything[:700], everything[700:1900]
    own = [Samples(first.inputs, first.labels * 0), everything[:0], Samples(last.inputs, last.labels * 0 + 1)]
    return make_federation([everything[:5]] * 3, own, everything)


def evaluate(federation: Federation, workers: int, weights: Weights) -> Evaluation:
    model = build("auto", (1, 8, 8), 3, ModelSettings(width="wide", dropout=0.5, latent_activation="sigmoid"), seed=0)
    engine = LocalEngine(FedAvg(), federation, model, weights, seed=0, device=CPU, workers=workers)
    try:
        return engine.evaluate(weights, 0)
    finally:
        engine.close()


def test_figures_are_the_same_for_any_number_of_workers_and_right(federation: Federation) -> None:
    model = build("auto", (1, 8, 8), 3, ModelSettings(width="wide", dropout=0.5, latent_activation="sigmoid"), seed=4)
    weights = weights_of(model)
    one, two, five = (evaluate(federation, workers, weights) for workers in (1, 2, 5))
    assert one == two == five

    model.eval()
    with torch.no_grad():
        scores = model(federation.test.inputs.float() / 127.5 - 1)
    found, labels = scores.argmax(1), federation.test.labels
    hits = (found == labels).double()
    near = 3e-3  # a tie may fall the other way by rounding
    assert one.accuracy == pytest.approx(float(hits.mean()), abs=near)
    assert one.loss == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), abs=1e-4)
    assert one.accuracy_by_class == pytest.approx([float(hits[labels == c].mean()) for c in range(3)], abs=near)
    clients = [float((found[:700] == 0).double().mean()), float((found[700:1900] == 1).double().mean())]
    assert abs(clients[0] - clients[1]) > 0.1
    assert one.accuracy_by_client[1] is None
    assert one.accuracy_by_client[::2] == pytest.approx(clients, abs=near)


def outcome(*predicted: int, losses: float = 0.0) -> Scored:
    return Scored(torch.tensor(predicted, dtype=torch.int64), torch.full((len(predicted),), losses))


def test_personal_models_by_hand() -> None:
    # two models on four test samples: 1/4 and 3/4 are right; the third client has no test split, and class 2 is absent
    scored = [
        (outcome(0, 1, 0, 0, losses=1.0), outcome(0, 0, 0, 1), outcome(0)),
        (outcome(0, 0, 0, 3, losses=3.0), outcome(1, 0), outcome()),
        (outcome(1, 0, 1, 0, losses=2.0), outcome(), outcome(1, 0)),
    ]
    splits = labelled_splits([0, 0, 1, 3], [0] * 6, [0] * 3, (4, 2, 0), (1, 0, 2))
    result = gathered(scored, splits, 4)
    assert result.accuracy == pytest.approx((1 / 4 + 3 / 4 + 2 / 4) / 3)
    assert result.loss == 2.0
    assert result.accuracy_by_class == [pytest.approx(v) for v in ((0.5 + 1 + 0.5) / 3, 1 / 3)] + [None] + [
        pytest.approx(1 / 3)
    ]
    assert result.accuracy_by_client == [0.75, 0.5, None]
    assert result.validation_by_client == [1.0, None, 0.5]
    assert result.most_predicted == pytest.approx(8 / 12)  # all of their predictions together
    assert result.largest_class == 0.5


def test_personal_models_by_domain_are_judged_at_home_alone() -> None:
    scored = [
        (outcome(), outcome(0, 0, 1, 0, losses=1.0), outcome()),
        (outcome(), outcome(1, 1, losses=4.0), outcome()),
    ]
    result = gathered(scored, labelled_splits([], [0, 0, 1, 1, 0, 1], [], (4, 2), (0, 0)), 2)
    assert result == Evaluation(4 / 6, 2.0, [2 / 3, 2 / 3], [0.75, 0.5], [], 0.5, 0.5)


def of_times(risks: list[float], losses: float = 0.0) -> Scored:
    return Scored(torch.tensor(risks, dtype=torch.float64), torch.full((len(risks),), losses))


def test_times_are_judged_by_the_c_index_by_hand() -> None:
    """A grid of two times: cells 0 and 1 are events at them, 2, 3 and 4 are left before the first, before the second, and after it."""
    # the event at the first time against the others, 4 pairs but for who left before it: 2 right, 1 tied, 1 wrong; the second: 1 of 1
    splits = replace(labelled_splits([0, 1, 2, 3, 4, 4], [0, 4, 2, 2], [1, 4], (2, 2), (2, 0)), times=2)
    scored = of_times([0.5, 0.9, 0.0, 0.5, 0.1, 0.2, 3.0, 2.0, 1.0, 1.0, 0.1, 0.4], losses=2.0)
    found = gather([scored], splits, 5)
    pairs = [(0.5, 0.9), (0.5, 0.5), (0.5, 0.1), (0.5, 0.2), (0.9, 0.1), (0.9, 0.2)]
    index = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    assert found.accuracy == pytest.approx(index)
    assert found.accuracy_by_class == [found.accuracy]
    assert found.accuracy_by_client == [1.0, None], "of two who left before the first time none is known to be earlier"
    assert found.validation_by_client == [0.0, None]
    assert (found.loss, found.most_predicted, found.largest_class) == (2.0, None, None)
    nothing = gather([of_times([0.3, 0.1])], replace(labelled_splits([2, 2], [], [], (0, 0), (0, 0)), times=2), 5)
    assert nothing.accuracy == 0.5, "nobody can be ranked"


def test_personal_models_of_times_by_hand() -> None:
    splits = replace(labelled_splits([0, 4], [0, 4, 1, 4], [], (2, 2), (0, 0)), times=2)
    scored = [
        (of_times([1.0, 0.0]), of_times([1.0, 0.0]), of_times([])),
        (of_times([0.0, 1.0]), of_times([1.0, 1.0]), of_times([])),
    ]
    found = gathered(scored, splits, 5)
    assert found.accuracy == 0.5
    assert found.accuracy_by_client == [1.0, 0.5]
    assert (found.most_predicted, found.largest_class) == (None, None)
    at_home = gathered(
        [(of_times([]), *one[1:]) for one in scored],
        replace(labelled_splits([], [0, 4, 1, 4], [], (2, 2), (0, 0)), times=2),
        5,
    )
    # all own rows together, each by its owner's: (1, 0), (1, 1), (1, 1) and, of the event at the second time, (1, 0) and (1, 1)
    assert at_home.accuracy == pytest.approx((2 + 3 / 2) / 5)


def test_by_domain_the_clients_own_splits_are_the_test_set(
    random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
) -> None:
    whole = random_samples(10)
    plain = make_federation([whole, whole], [whole[:7], whole[7:]], whole)
    by_domain = replace(plain, domains=("sea", "air"))
    assert [[len(part) for part in splits_of(each).all] for each in (plain, by_domain)] == [[10, 10, 0], [0, 10, 0]]
    assert splits_of(by_domain).own_sizes == (7, 3)
    # where nobody has a split of their own, there is no other test set
    bare = make_federation([whole, whole], None, whole)
    assert [len(part) for part in splits_of(replace(bare, domains=("sea", "air"))).all] == [10, 0, 0]


def fair(clients: list[float | None], classes: list[float | None]) -> dict[str, float | None]:
    return fairness(Evaluation(accuracy=0.123, loss=9.0, accuracy_by_class=classes, accuracy_by_client=clients))


def test_fairness_by_hand() -> None:
    found = fair([0.9, None, 0.5, 0.7], [1.0, 0.4, None])
    assert tuple(found) == FAIRNESS
    # percentages 90, 50, 70 are 20, 20 and 0 from their mean; 100 and 40 are 30 from theirs
    assert found == {
        "mean_client_accuracy": pytest.approx(0.7),
        "worst_client_accuracy": 0.5,
        "worst_tenth_accuracy": 0.5,
        "client_variance": pytest.approx((400 + 400 + 0) / 3),
        "class_variance": pytest.approx(900),
    }
    assert fair([0.25], [0.5]) == {
        "mean_client_accuracy": 0.25,
        "worst_client_accuracy": 0.25,
        "worst_tenth_accuracy": 0.25,
        "client_variance": 0.0,
        "class_variance": 0.0,
    }


@pytest.mark.parametrize(("clients", "tenth"), [(1, [0]), (10, [0]), (19, [0, 1]), (25, [0, 1]), (100, range(10))])
def test_the_worst_tenth_is_a_mean_over_clients(clients: int, tenth: list[int]) -> None:
    # client k recognises k percent, and they come in another order; who has no test split isn't counted
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(0)).tolist()
    found = fair([None, *(k / 100 for k in order), None], [0.5])
    assert found["worst_tenth_accuracy"] == pytest.approx(sum(tenth) / len(tenth) / 100)
    assert found["worst_client_accuracy"] == 0.0
    assert found["client_variance"] == pytest.approx((clients**2 - 1) / 12)  # of the numbers 0 to n - 1


def test_fairness_where_no_client_has_a_test_split() -> None:
    found = fair([None, None], [0.2, 0.4])
    assert found.pop("class_variance") == pytest.approx(100)
    assert set(found.values()) == {None}
    assert set(fair([], [None]).values()) == {None}


def test_chunks_are_of_one_size_and_bring_no_graph() -> None:
    sizes: list[int] = []
    factor = torch.ones(1, requires_grad=True)

    def double(inputs: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        return 2 * factor * inputs

    images = (torch.arange(2 * CHUNK + 1) % 256).to(torch.uint8)[:, None]
    found = in_chunks(double, Samples(images, torch.zeros(2 * CHUNK + 1, dtype=torch.int64)))
    assert sizes == [CHUNK, CHUNK, 1]
    assert not found.requires_grad
    torch.testing.assert_close(found, 2 * (images.float() / 127.5 - 1))


def test_mean_loss_by_hand() -> None:
    # scores (x, 0) with x = ln 3: the losses of 750 samples are ln 4/3, those of the other 750 are ln 4
    model = with_streams(Line()).eval()
    model.norm.eps = 0.0  # type: ignore[union-attr, assignment]
    labels = torch.arange(1500) // 750
    found = mean_loss(model, Samples(torch.full((1500, 1), math.log(3)), labels))
    assert found == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, abs=1e-6)


def test_scoring_in_chunks_is_scoring_one_by_one() -> None:
    model = with_streams(Line())
    resident = Resident(model, CPU, False)
    everything = Samples(torch.linspace(-1, 1, CHUNK + 7)[:, None], torch.arange(CHUNK + 7) % 2)
    scored = score_all(resident, everything)
    assert scored.predicted.tolist() == [int(x <= 0) for x in everything.inputs[:, 0].tolist()]
    assert scored.losses[-7:].tolist() == pytest.approx(score(resident, everything[-7:]).losses.tolist())
    nothing = score_all(resident, everything[:0])
    assert (nothing.predicted.dtype, nothing.losses.dtype) == (torch.int64, torch.float32)
    assert (len(nothing.predicted), len(nothing.losses)) == (0, 0)
