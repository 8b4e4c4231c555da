"""What one host holds: read as it lies on its disk, its classes found by name, and broken data get a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from tests.experiment.test_numbers import TOML, stays
from tests.helpers import refused

from fedfill import tree
from fedfill.data.division import federate
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.data.schema import from_toml
from fedfill.deployment.host_data import FORMATS, Task, load_host, save_host

NAMES = ("ant", "bee", "cat", "dog")
TASK = Task("insects", 3, NAMES, (1, 4, 5))


def pixels(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 5), dtype=np.uint8)


def samples_of(images: np.ndarray[Any, Any], labels: list[int]) -> Samples:
    return Samples(torch.from_numpy(images)[:, None], torch.tensor(labels))


def rows(*parts: Samples) -> list[tuple[bytes, int]]:
    """All samples, whatever their order."""
    return sorted(
        (image.numpy().tobytes(), int(label))
        for part in parts
        for image, label in zip(part.inputs, part.labels, strict=True)
    )


def write_parquet(path: Path, images: np.ndarray[Any, Any], labels: list[int], names: list[str] | None) -> None:
    label: Any = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    data = datasets.Dataset.from_dict({"image": [Image.fromarray(p) for p in images], "label": labels}, features)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.to_parquet(str(path))


def write_images(folder: Path, images: np.ndarray[Any, Any], names: list[str]) -> None:
    for k, (image, name) in enumerate(zip(images, names, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name / f"{k:03}.png")


def write_tensors(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


def unread(
    path: Path, *facts: object, form: str = "safetensors", task: Task = TASK, of: str = "data", **options: Any
) -> None:
    with refused(of, *facts) as caught:
        load_host(path, form, task, **options)
    assert "\n" not in str(caught.value)


# ---- what is read


@pytest.mark.parametrize("names", [["dog", "bee"], ["ant", "bee", "cat", "dog"]])
def test_parquet_classes_are_found_by_their_names(tmp_path: Path, names: list[str]) -> None:
    images, words = pixels(6), ["dog", "bee", "dog", "dog", "bee", "bee"]
    write_parquet(tmp_path / "train-0.parquet", images, [names.index(word) for word in words], names)
    data = load_host(tmp_path, "parquet", TASK)
    assert rows(data.train) == rows(samples_of(images, [NAMES.index(word) for word in words]))
    assert len(data.test) == 0


def test_image_folders_of_a_part_of_the_classes(tmp_path: Path) -> None:
    images, words = pixels(5), ["dog", "bee", "dog", "dog", "dog"]
    write_images(tmp_path, images, words)
    data = load_host(str(tmp_path), "images", TASK)
    assert rows(data.train) == rows(samples_of(images, [NAMES.index(word) for word in words]))
    assert data.train.counts(4) == [0, 1, 0, 4]


def test_image_folders_with_a_test_split_of_their_own(tmp_path: Path) -> None:
    images = pixels(6)
    write_images(tmp_path / "train", images[:4], ["cat", "dog", "dog", "cat"])
    write_images(tmp_path / "test", images[4:], ["dog", "cat"])
    data = load_host(tmp_path, "images", TASK, share=0.1)
    assert rows(data.train) == rows(samples_of(images[:4], [2, 3, 3, 2]))
    assert rows(data.test) == rows(samples_of(images[4:], [3, 2]))


def test_parquet_with_a_test_split_of_its_own(tmp_path: Path) -> None:
    images = pixels(6)
    write_parquet(tmp_path / "train.parquet", images[:4], [0, 1, 1, 0], ["cat", "dog"])
    write_parquet(tmp_path / "test.parquet", images[4:], [1, 0], ["cat", "dog"])
    data = load_host(tmp_path, "parquet", TASK, share=0.5)
    assert rows(data.train) == rows(samples_of(images[:4], [2, 3, 3, 2]))
    assert rows(data.test) == rows(samples_of(images[4:], [3, 2]))


def test_a_host_may_hold_one_sample_only(tmp_path: Path) -> None:
    write_images(tmp_path, pixels(1), ["dog"])
    for share in (0.0, 0.3):
        data = load_host(tmp_path, "images", TASK, share=share)
        assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([3], [])


def test_without_a_share_nothing_is_held_out_and_a_test_split_is_not_used(tmp_path: Path) -> None:
    images, labels = pixels(40), [k % 2 for k in range(40)]
    write_images(tmp_path / "plain", images, [NAMES[k] for k in labels])
    data = load_host(tmp_path / "plain", "images", TASK, share=0)
    assert rows(data.train) == rows(samples_of(images, labels)), "not the fifth that a whole data set would lose"
    assert len(data.test) == 0
    save_host(tmp_path / "both", ClientData(samples_of(images, labels), samples_of(images[:8], labels[:8])))
    data = load_host(tmp_path / "both", "safetensors", TASK, share=0)
    assert (len(data.train), len(data.test)) == (40, 0)


def test_a_share_is_held_out_by_class_and_by_client_and_is_the_same_again(tmp_path: Path) -> None:
    images, labels = pixels(60), [k % 3 for k in range(60)]
    path = write_tensors(tmp_path / "d", inputs=torch.from_numpy(images)[:, None], labels=torch.tensor(labels))

    def held(client: int, seed: int) -> list[tuple[bytes, int]]:
        data = load_host(path, "safetensors", TASK, share=0.25, client=client, seed=seed)
        assert data.test.counts(4) == [5, 5, 5, 0]
        assert rows(data.train, data.test) == rows(samples_of(images, labels))
        return rows(data.test)

    assert held(0, 0) == held(0, 0)
    assert held(0, 0) != held(1, 0)
    assert held(0, 0) != held(0, 1)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "mine", pixels(3), ["ant", "ant", "bee"])
    assert len(load_host("~/mine", "images", TASK).train) == 3


# ---- a round trip


def assert_same(found: ClientData, given: ClientData) -> None:
    for one, other in (
        (found.train, given.train),
        (found.test, given.test),
        (found.unlabelled, given.unlabelled),
    ):
        assert one.inputs.dtype == other.inputs.dtype
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("labelled", [None, 12])
@pytest.mark.parametrize("client_test", [0.0, 0.2])
def test_what_a_rehearsal_saves_is_what_its_hosts_read(
    tmp_path: Path, client_test: float, labelled: int | None
) -> None:
    federation = federate(
        "digits", fraction=0.1, clients=3, seed=0, partition="dirichlet:0.3", client_test=client_test, labelled_per_client=labelled
    )  # fmt: skip
    task = Task.of(federation)
    assert task == replace(task, **{k: tuple(v) if isinstance(v, list) else v for k, v in task.document().items()})
    for i, given in enumerate(federation.clients):
        save_host(tmp_path / f"host{i}" / "data", given)
        found = load_host(
            tmp_path / f"host{i}" / "data", "safetensors", task, client=i, share=client_test, labelled=labelled
        )
        assert_same(found, given)
        assert (len(found.unlabelled) > 0) == (labelled is not None)


def test_a_host_keeps_the_labels_that_a_simulation_keeps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fraction": 0.1, "clients": 3, "seed": 4, "partition": "iid"}
    task = Task.of(federate("digits", **options))
    for i, given in enumerate(federate("digits", **options).clients):
        save_host(tmp_path / f"{i}", given)
        found = load_host(tmp_path / f"{i}", "safetensors", task, client=i, share=0.1, labelled=15, seed=4)
        assert_same(found, federate("digits", **options, labelled_per_client=15).clients[i])


def test_a_host_holds_its_own_test_split_out_before_labels_go(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", pixels(40), [NAMES[k % 4] for k in range(40)])
    whole = load_host(tmp_path / "mine", "images", TASK, client=2, share=0.3, seed=1)
    part = load_host(tmp_path / "mine", "images", TASK, client=2, share=0.3, seed=1, labelled=6)
    assert torch.equal(part.test.inputs, whole.test.inputs)
    assert (len(part.train), len(part.unlabelled), len(part.test)) == (6, 22, 12)
    assert part.unlabelled.labels.tolist() == [-1] * 22
    pictures = [{row[0] for row in rows(samples)} for samples in (part.train, part.unlabelled, whole.train)]
    assert pictures[0] | pictures[1] == pictures[2]


def test_a_host_may_bring_samples_without_labels(tmp_path: Path) -> None:
    own = ClientData(samples_of(pixels(8), [0, 1] * 4), TASK.nothing, samples_of(pixels(5, 1), [-1] * 5))
    save_host(tmp_path / "d", own)
    assert_same(load_host(tmp_path / "d", "safetensors", TASK), own)
    part = load_host(tmp_path / "d", "safetensors", TASK, labelled=2)
    assert part.train.counts(2) == [1, 1]
    assert torch.equal(part.unlabelled.inputs[:5], own.unlabelled.inputs)
    assert part.unlabelled.labels.tolist() == [-1] * 11


def test_an_empty_test_split_that_was_saved_stays_empty(tmp_path: Path, random_samples: Callable[..., Samples]) -> None:
    given = ClientData(random_samples(30, (1, 4, 5)), random_samples(30, (1, 4, 5))[:0])
    save_host(tmp_path / "d", given)
    assert_same(load_host(tmp_path / "d", "safetensors", TASK, share=0.3), given)


def test_samples_that_are_no_images(tmp_path: Path) -> None:
    task = Task("numbers", 1, ("a", "b"), (7,), "float32")
    given = ClientData(Samples(torch.randn(9, 7), torch.arange(9) % 2), Samples(torch.randn(2, 7), torch.arange(2)))
    save_host(tmp_path / "d", given)
    assert_same(load_host(tmp_path / "d", "safetensors", task, share=0.1), given)
    federation = task.remote(given.test)
    assert (federation.classes, federation.shape, federation.test.inputs.dtype) == (2, (7,), torch.float32)


def test_views_of_one_tensor_can_be_saved(tmp_path: Path) -> None:
    whole = torch.from_numpy(pixels(8)).repeat(1, 1, 2)[:, None]
    samples = Samples(whole[::2, :, :, :5], torch.arange(8)[::2] % 4)
    given = ClientData(samples, samples)
    save_host(tmp_path / "d", given)
    assert_same(load_host(tmp_path / "d", "safetensors", TASK, share=0.1), given)


# ---- what all parties agreed on


def test_a_party_without_data_sees_a_federation_of_nobody() -> None:
    federation = TASK.remote()
    assert isinstance(federation, Federation)
    assert [len(client.train) for client in federation.clients] == [0, 0, 0]
    assert federation.class_names == NAMES
    assert federation.shape == (1, 4, 5)
    assert len(federation.test) == 0


def test_all_parties_have_one_fingerprint_and_another_task_has_another() -> None:
    assert TASK.remote().fingerprint == Task("insects", 3, NAMES, (1, 4, 5)).remote().fingerprint
    others = [
        replace(TASK, clients=4),
        replace(TASK, class_names=NAMES[::-1]),
        replace(TASK, shape=(1, 5, 4)),
        replace(TASK, dtype="float32"),
        replace(TASK, fingerprint="of the data"),
    ]
    assert len({task.remote().fingerprint for task in [TASK, *others]}) == 6
    assert TASK.remote(TASK.nothing).fingerprint == TASK.remote().fingerprint


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"dtype": "int8"}, ("'int8'", "uint8, float32")),
        ({"clients": 0}, (0, "at least 1")),
        ({"clients": "3"}, ("'3'",)),
        ({"class_names": ("ant", "ant")}, ("['ant', 'ant']", "different")),
        ({"class_names": ("ant",)}, ("['ant']", "two or more")),
        ({"shape": ()}, ("[]", "[1, 28, 28]")),
        ({"shape": (1, 0, 28)}, ("[1, 0, 28]",)),
        ({"shape": (1, 2.5)}, ("[1, 2.5]",)),
    ],
)
def test_a_task_that_makes_no_sense(changes: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refused(*changes, *facts):
        replace(TASK, **changes)


# ---- slips


def test_an_unknown_format(tmp_path: Path) -> None:
    unread(tmp_path, "'parquett'", "'parquet'", form="parquett", of="format")
    unread(tmp_path, "'hdf9'", "images, parquet, safetensors", form="hdf9", of="format")


@pytest.mark.parametrize("form", FORMATS)
def test_a_place_that_is_not_there(tmp_path: Path, form: str) -> None:
    missing = tmp_path / "nowhere"
    unread(missing, f"'{missing}'", FORMATS[form], form=form)
    unread(missing, f"'{missing}'", form=form, setting="test-data", of="test-data")


@pytest.mark.parametrize("form", ["parquet", "images"])
def test_a_folder_that_holds_nothing_of_the_kind(tmp_path: Path, form: str) -> None:
    (tmp_path / "empty").mkdir()
    unread(tmp_path / "empty", form=form, of="data 'empty'")
    (tmp_path / "file.txt").write_text("no data")
    unread(tmp_path / "file.txt", "file.txt", "no folder", FORMATS[form], form=form)


def test_a_class_that_was_not_agreed_on(tmp_path: Path) -> None:
    write_images(tmp_path / "i", pixels(3), ["ant", "beee", "ant"])
    unread(tmp_path / "i", tmp_path / "i", "'beee'", "'bee'", form="images")
    write_parquet(tmp_path / "p" / "train.parquet", pixels(2), [0, 1], ["ant", "zebra"])
    unread(tmp_path / "p", tmp_path / "p", "'zebra'", "ant, bee, cat, dog", form="parquet")


def test_images_of_another_shape(tmp_path: Path) -> None:
    write_images(tmp_path, pixels(3).transpose(0, 2, 1), ["ant", "bee", "ant"])
    unread(tmp_path, tmp_path, "torch.uint8", "[1, 5, 4]", "[1, 4, 5]", form="images")


def test_safetensors_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"nothing of the kind")
    unread(tmp_path / "d", tmp_path / "d", "read as safetensors")
    unread(tmp_path, tmp_path, "read as safetensors")
    good = write_tensors(tmp_path / "g", inputs=torch.zeros(2, 1, 4, 5, dtype=torch.uint8), labels=torch.arange(2))
    good.write_bytes(good.read_bytes()[:-3])
    unread(good, good, "read as safetensors")


IMAGES = torch.zeros(3, 1, 4, 5, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"inputs": IMAGES}, ("both inputs and labels",)),
        ({"labels": LABELS}, ("both inputs and labels",)),
        ({}, ("both inputs and labels",)),
        ({"inputs": IMAGES, "labels": LABELS, "test_labels": LABELS}, ("both test_inputs and test_labels",)),
        (
            {"inputs": IMAGES, "labels": LABELS[:2]},
            ("int64 of shape [2]", "3 samples"),
        ),
        ({"inputs": IMAGES, "labels": LABELS.int()}, ("torch.int32 of shape [3]", "one int64")),
        ({"inputs": IMAGES, "labels": LABELS[:, None]}, ("of shape [3, 1]", "one int64")),
        ({"inputs": IMAGES[0, 0, 0, 0], "labels": LABELS}, ("labels", "one int64", "0 samples")),
        ({"inputs": IMAGES, "labels": LABELS + 1}, ("labels", "4 classes")),
        ({"inputs": IMAGES, "labels": LABELS - 1}, ("labels", "4 classes")),
        ({"inputs": IMAGES.float(), "labels": LABELS}, ("torch.float32 samples of shape [1, 4, 5]",)),
        ({"inputs": IMAGES[..., :4], "labels": LABELS}, ("torch.uint8 samples of shape [1, 4, 4]",)),
        ({"inputs": IMAGES[:, 0], "labels": LABELS}, ("samples of shape [4, 5]",)),
        ({"inputs": IMAGES[:0], "labels": LABELS[:0]}, ("no samples", "at least one")),
        (
            {"inputs": IMAGES, "labels": LABELS, "test_inputs": IMAGES, "test_labels": LABELS + 9},
            ("test_labels", "beyond"),
        ),
        (
            {"inputs": IMAGES, "labels": LABELS, "test_inputs": IMAGES[..., :4], "test_labels": LABELS},
            ("samples of shape [1, 4, 4]",),
        ),
        (
            {"inputs": IMAGES, "labels": LABELS, "unlabelled_inputs": IMAGES[..., :4]},
            ("unlabelled_inputs", "torch.uint8 samples of shape [1, 4, 4]"),
        ),
        ({"inputs": IMAGES, "labels": LABELS, "unlabelled_inputs": IMAGES[0, 0, 0, 0]}, ("samples of shape []",)),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], facts: tuple[str, ...]) -> None:
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    unread(write_tensors(tmp_path / "d", **copies), *facts, share=0.1)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    task = Task("numbers", 1, ("a", "b"), (2,), "float32")
    inputs = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    path = write_tensors(tmp_path / "d", inputs=inputs, labels=torch.arange(2))
    unread(path, path, "NaN", task=task)


def test_a_host_writes_what_it_keeps_with_no_word_of_python(tmp_path: Path) -> None:
    save_host(tmp_path / "d", ClientData(samples_of(pixels(2), [0, 1]), TASK.nothing))
    assert set(safetensors.torch.load_file(tmp_path / "d")) == {"inputs", "labels", "test_inputs", "test_labels"}
    assert tree.sha256(dict(safetensors.torch.load_file(tmp_path / "d")))


def test_a_number_is_read_from_a_table_and_from_tensors(tmp_path: Path) -> None:
    task = Task.by(from_toml(TOML, ""), "stays", 3)
    assert (task.class_names, task.of_numbers, task.nothing.labels.dtype) == (("stay",), True, torch.float32)
    frame = stays(200)
    frame.to_csv(tmp_path / "stays.csv", index=False)
    found = load_host(tmp_path / "stays.csv", "table", task, share=0.2, validation=0.25)
    assert [len(part) for part in (found.train, found.test, found.validation)] == [120, 40, 40]
    everything = torch.cat([part.labels for part in (found.train, found.test, found.validation)])
    assert sorted(everything.tolist()) == pytest.approx(sorted((frame["stay"] / 20 - 1).tolist()), abs=1e-6)
    save_host(tmp_path / "host.safetensors", found)
    again = load_host(tmp_path / "host.safetensors", "safetensors", task, share=0.2, validation=0.25)
    assert torch.equal(again.train.labels, found.train.labels)
    assert torch.equal(again.validation.inputs, found.validation.inputs)
    inputs = torch.zeros(2, *task.shape)
    for labels, facts in (
        (torch.tensor([0.0, 1.5]), ("-1..1",)), (torch.tensor([0.0, float("nan")]), ("-1..1",)),
        (torch.tensor([0, 1]), ("int64", "float32")),
    ):  # fmt: skip
        safetensors.torch.save_file({"inputs": inputs, "labels": labels}, tmp_path / "wrong.safetensors")
        with refused("data", *facts):
            load_host(tmp_path / "wrong.safetensors", "safetensors", task)
    with refused("class_names"):
        Task("stays", 3, ("stay",), (2,), "float32")
