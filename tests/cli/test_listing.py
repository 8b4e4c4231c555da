"""What ``fedfill list`` names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.calls import fedfill_

from fedfill import algorithms
from fedfill.algorithms import find, known_algorithms
from fedfill.catalogue import built_in, when
from fedfill.cli.listing import settings_of
from fedfill.models.networks import ModelSettings


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("algorithms", ["fedavg", "feddpms"]),
        ("datasets", ["digits", "cifar100", "digits-domains"]),
        ("partitions", ["iid", "dirichlet", "domain:K"]),
        ("models", ["auto", "cnn2"]),
    ],
)
def test_list(what: str, words: list[str]) -> None:
    result = fedfill_("list", what)
    assert result.exit_code == 0
    first = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert any(entry.startswith(word) for word in words for entry in first)


def test_list_names_every_algorithm() -> None:
    text = fedfill_("list", "algorithms").stdout
    names = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    # other tests of this process may have algorithms of their own
    assert names == [name for name, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")]
    assert names == [*built_in()]
    files = {path.stem for path in Path(algorithms.__file__).parent.glob("[!_]*.py")}
    assert {find(name).__module__.rpartition(".")[2] for name in names} >= files


def test_list_settings_knows_every_setting_and_its_words() -> None:
    text = fedfill_("list", "settings", "feddpms").stdout
    first = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert first == [*find("feddpms").model_fields, *(f"model.{name}" for name in ModelSettings.model_fields)]
    assert " ".join(text.split()).count("[adam, adamw, sgd]") == 1
    assert "[true, false]" in " ".join(text.split())
    assert "[shift, shift_flip, crop, crop_colour, none]" in " ".join(text.split())


def test_every_argument_and_setting_has_a_word_of_help() -> None:
    """Some pairs of typer and click lose the help of arguments, and a mixin's settings lose theirs without a flag."""
    for command, words in {
        "run": "A name of 'fedfill list algorithms'", "list": "algorithms, datasets, partitions", "reproduce": "A folder with",
        "compare": "Names or FILE.py:NAME", "measure": "Directory of a finished run", "resume": "A run directory",
    }.items():  # fmt: skip
        assert words in fedfill_(command, "--help").stdout
    for name in known_algorithms():
        assert [row[0] for row in settings_of(name) if not row[2].split(" [")[0].strip()] == []


def test_defaults_for_single_data_sets_are_listed() -> None:
    rows = {row[0]: row[1] for row in settings_of("feddpms")}
    assert rows["alpha"] == "50; cifar10: 200"


def test_every_algorithm_says_when_to_use_it() -> None:
    ours = {name: kind for name, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")}
    text = " ".join(fedfill_("list", "algorithms").stdout.split())
    for name, kind in ours.items():
        sentence = when(kind.__doc__)
        assert re.fullmatch(r"Use it \S.*\.", sentence), f"{name} does not say when to use it"
        assert len(sentence) <= 120
        assert f"{name} {sentence}" in text


def test_an_algorithm_of_ones_own_is_listed_by_what_it_is() -> None:
    class Mine:
        """The mean of means.

        More of it.
        """

    assert when(Mine.__doc__) == "The mean of means."
    assert when(type("Silent", (), {}).__doc__) == ""
