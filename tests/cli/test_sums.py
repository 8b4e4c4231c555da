"""Settings of sums and heads on the command line: one sentence for each slip, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.calls import TINY, fedfill_, refused

SLIPS: list[tuple[str, str, str, list[str]]] = [
    # algorithm, what is set, which setting is named, facts
    ("fed3r", "trust=nobody", "trust", ["nobody", "site", "secure", "server"]),
    ("fed3r", "target_epsilon=0", "target_epsilon", ["0"]),
    ("fed3r", "target_epsilon=-1", "target_epsilon", ["-1"]),
    ("fed3r", "target_epsilon=inf", "target_epsilon", ["inf"]),
    ("fed3r", "target_epsilon=nan", "target_epsilon", ["nan"]),
    ("fed3r", "target_epsilon=much", "target_epsilon", ["much", "number"]),
    ("fed3r", "target_delta=0", "target_delta", ["0"]),
    ("fed3r", "target_delta=1", "target_delta", ["1"]),
    ("fed3r", "honest=3", "honest", ["3", "trust=secure"]),
    ("fed3r", "honest=3 target_epsilon=1", "honest", ["3", "trust=secure"]),
    ("fed3r", "honest=0 trust=secure", "honest", ["0"]),
    ("fed3r", "ridge_lambda=-0.1", "ridge_lambda", ["-0.1"]),
    ("fed3r", "trust=secure", "trust", ["secure", "target_epsilon"]),
    ("softmax", "trust=server", "trust", ["server", "target_epsilon"]),
    ("fed3r", "ridge_lambda=aic", "ridge_lambda", ["aic", "gcv", "evidence", "loo", "holdout"]),
    ("fed3r", "ridge_lambda=loo target_epsilon=1", "ridge_lambda", ["loo", "target_epsilon"]),
    ("fed3r", "ridge_lambda=nan", "ridge_lambda", ["nan"]),
    ("fed3r", "column_norm=perhaps", "column_norm", ["perhaps", "true"]),
    ("fed3r", "scale=0", "scale", ["0"]),
    ("fed3r", "filter_steps=3", "filter_steps", ["3", "patches"]),
    ("fed3r", "filter_steps=-1", "filter_steps", ["-1"]),
    ("fed3r", "filter_steps=2 model.features=patches(9) target_epsilon=1", "filter_steps", ["2", "target_epsilon"]),
    ("fed3r", "centre=real", "centre", ["real", "seeded", "federated"]),
    ("fed3r", "model.features=conv(0)", "features", ["conv", "0"]),
    ("fed3r", "model.features=konv(10)", "features", ["konv"]),
    ("fed3r", "model.features=project(10)>conv(10)", "features", ["conv"]),
    ("fed3r", "model.features=conv(10,size=99)", "features", ["99"]),
    ("fed3r", "model.features=fourier(7)", "features", ["7", "even"]),
    ("fed3r", "model.features=project(20000)", "features", ["20000"]),
    ("fed3r", "covariance=shared", "setting", ["'covariance'", "fedcgs"]),
    ("pfed3r", "nearness=0", "nearness", ["0"]),
    ("pfed3r", "scale=3", "scale", ["3"]),
    ("fedcgs", "covariance=full", "covariance", ["full", "shared", "class", "diagonal", "none"]),
    ("fedcgs", "shrinkage=2", "shrinkage", ["2", "oas"]),
    ("fedcgs", "shrinkage=ledoit", "shrinkage", ["ledoit", "oas"]),
    ("fedcgs", "prior=equal", "prior", ["equal", "train", "uniform"]),
    ("fedcgs", "covariance=class target_epsilon=1", "target_epsilon", ["1", "class"]),
    ("ccvr", "samples=0", "samples", ["0"]),
    ("ccvr", "samples=all", "samples", ["all", "inf"]),
    ("ccvr", "prior=equal", "prior", ["equal", "uniform"]),
    ("softmax", "penalty=-1", "penalty", ["-1"]),
    ("softmax", "gram_share=1", "gram_share", ["1"]),
    ("softmax", "gram_share=0", "gram_share", ["0"]),
    ("softmax", "clip=0", "clip", ["0"]),
    ("softmax", "rough=0", "rough", ["0"]),
    ("softmax", "steps=0", "steps", ["0"]),
    ("fedavg", "head=fed3", "head", ["fed3", "fed3r"]),
    ("fedavg", "head=fed3r:trust=nobody", "trust", ["nobody", "site"]),
    ("fedavg", "head=fed3r:honest=3", "honest", ["3", "trust=secure"]),
    ("fedavg", "head=fed3r:target_epsilon=1 model.latent_activation=none", "target_epsilon", ["1", "bounds"]),
    ("fedavg", "head=fed3r head_every=0", "head_every", ["0"]),
    ("fedavg", "head=fed3r head_mode=within", "head_mode", ["within", "beside", "replace"]),
    ("fedavg", "head_mode=replace", "head_mode", ["replace", "head"]),
    ("dpfedavg", "head=fed3r", "head", ["fed3r", "dpfedavg"]),
    ("pfedavg", "head=fed3r", "head", ["fed3r", "pfedavg"]),
    ("fedavg", "head=pfed3r", "head", ["pfed3r"]),
    ("local", "head=fed3r", "setting", ["'head'"]),
    ("central", "head=fed3r", "setting", ["'head'"]),
    ("fedavg", "model.features=conv(10)", "features", ["conv(10)"]),
    ("fedavg", "local=fed3r", "local", ["fed3r", "head"]),
]


@pytest.mark.parametrize(("algorithm", "words", "setting", "facts"), SLIPS)
def test_a_slip_is_one_sentence_that_names_the_setting(
    algorithm: str, words: str, setting: str, facts: list[str]
) -> None:
    options = [option for word in words.split(" ") for option in ("--set", word)]
    sentence = refused(["run", algorithm, *options], setting)
    assert [fact for fact in facts if fact not in sentence] == [], sentence


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["run", "fed3r", "--model", "cnn2", "--set", "model.latent_activation=none", "--set", "target_epsilon=1"], "target_epsilon"),
        (["run", "fed3r", "--model", "mlp", "--set", "centre=federated"], "centre"),
        (["run", "fedcgs", "--model", "mlp", "--set", "covariance=class"], "model"),
        (["run", "fed3r", "--start-from", "nowhere"], "start_from"),
        (["compare", "fedavg", "fed3r:ridge_lambda=-1"], "fed3r:ridge_lambda=-1"),
        (["compare", "fedavg:head=ccvr:samples=0", "fedavg"], "fedavg:head=ccvr:samples=0"),
    ],
)  # fmt: skip
def test_slips_of_more_than_one_option(words: list[str], setting: str) -> None:
    sentence = refused(words, setting) if words[0] == "run" else fedfill_(*words).stderr
    assert sentence.count("\n") <= 1
    assert "Traceback" not in sentence


def test_a_head_with_settings_in_set_and_in_a_variant(tmp_path: Path) -> None:
    """``head=ccvr:samples=inf`` holds a colon and an equals sign of its own, wherever it stands."""
    small = ["--data", "digits", *TINY]
    done = fedfill_("run", "fedavg", *small, "--set", "head=ccvr:samples=inf", "--out", str(tmp_path / "one"))
    assert done.exit_code == 0, done.output
    assert "samples=inf" in (tmp_path / "one" / "experiment.toml").read_text()
    both = fedfill_(
        "compare", "fedavg", "fedavg:head=ccvr:samples=inf;prior=train", *small, "--seeds", "0", "--out", str(tmp_path / "two")
    )  # fmt: skip
    assert both.exit_code == 0, both.output
    texts = [path.read_text() for path in (tmp_path / "two").rglob("experiment.toml")]
    assert sum("samples=inf,prior=train" in text for text in texts) == 1
    assert sum("ccvr" in text for text in texts) == 1


def test_the_account_is_printed_with_what_it_holds_for(tmp_path: Path) -> None:
    """Epsilon comes with the neighbours, the delta and the trust that it is for."""
    options = ["--set", "features=conv(10)>project(16)", "--set", "target_epsilon=3"]
    for trust, fact in (("site", "at each client"), ("server", "the server adds the noise as told")):
        done = fedfill_(
            "run", "fed3r", "--data", "digits", "--clients", "3", *options, "--set", f"trust={trust}", "--out", str(tmp_path / trust)
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        text = " ".join(done.stdout.split())
        for word in ("added or removed", "1e-05", fact):
            assert word in text or word in (tmp_path / trust / "summary.json").read_text(), (trust, word)
        assert ("no differential-privacy guarantee" in text) == (trust == "server")
