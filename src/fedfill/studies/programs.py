"""Programs of a trained model for who has no fedfill: of torch.export and of ONNX, with the preprocessing inside."""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfill.data.inputs import Inputs
from fedfill.errors import FedfillError, first_line
from fedfill.models.plain import plain
from fedfill.studies.model import Model

CHECKED = 250
"""Samples on which a program is compared with the model, at the most."""
AT_ONCE = 50
"""Of them at one time: responses of many filters to many images are large."""
CLOSE = 1e-3
"""Largest difference that rounding explains: of a probability, and of a score over its own size and a sample's usual one."""
RANKS = "scores of cells by which rows can be ranked; their softmax are no probabilities, as no site's hazard over time is known"
PACKAGES = {"pt2": (), "onnx": ("onnx", "onnxruntime", "onnxscript")}
"""By form: what has to be installed."""


class Program(nn.Module):
    """What is traced: inputs as others have them to class scores.

    Args:
        model: The model.

    Attributes:
        network: In operations that other programs know.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = plain(model.network)
        self.kind = model.inputs.kind
        self.columns = model.inputs.columns
        self.number = model.inputs.number

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores ``[n, classes]`` of uint8 images, of a table's numbers and words in its own units (float64), or of floats.

        Of a model of a number ``[n, 1]``, in the unit of the target.
        """
        if self.columns is not None:
            inputs = self.columns.scaled(inputs)
        elif self.kind == "images":
            inputs = inputs.to(torch.float32) * (1 / 127.5) - 1.0
        scores: Tensor = self.network(inputs)
        return scores if self.number is None else self.number.in_unit(scores)


def require(form: str) -> None:
    """Refuse a form whose packages are not installed."""
    if missing := [package for package in PACKAGES[form] if find_spec(package) is None]:
        raise FedfillError(f"{form}: {', '.join(missing)} can't be found; pip install 'fedfill[{form}]'")


def write_program(model: Model, form: str, file: Path, samples: Tensor) -> dict[str, Any]:
    """Trace a model, write the program, and compare what it gives.

    Args:
        model: The model.
        form: ``pt2`` or ``onnx``.
        file: Where to.
        samples: Real inputs as they are stored, ``[n, ...]``.

    Returns:
        For the card: how it was made, its SHA-256, on how many samples it was compared, the largest difference of a
        probability, and of a score over its size.

    Raises:
        FedfillError: Where the network can't be traced, a package is missing, or the program gives something else.
    """
    raw = _raw(model.inputs, samples)
    with _quietly():
        try:
            # two, so that no step takes the number of inputs for a constant; zeros, as a program keeps what it was traced with
            nothing = torch.zeros(2, *raw.shape[1:], dtype=raw.dtype)
            traced = torch.export.export(
                Program(model).eval(), (nothing,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},)
            )
        except Exception as error:  # whatever a module of a user's may raise
            raise FedfillError(
                f"{form}: torch.export can't trace {type(model.network).__name__} ({first_line(error)}); allowed: networks without "
                "control flow that depends on their inputs; fedfill.load(DIR) works all the same"
            ) from error
        file.parent.mkdir(parents=True, exist_ok=True)
        run, made_by = (_pt2 if form == "pt2" else _onnx)(traced, file)
    largest, of_scores, same = 0.0, 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(raw), AT_ONCE):
            expected, found = model(samples[start : start + AT_ONCE]), run(raw[start : start + AT_ONCE])
            size = expected.abs() + expected.abs().median(1, keepdim=True).values
            of_scores = max(of_scores, float(((found - expected).abs() / size).max()))
            largest = max(largest, float((found.softmax(1) - expected.softmax(1)).abs().max()))
            same += int((found.argmax(1) == expected.argmax(1)).sum())
    if not max(largest, of_scores) <= CLOSE:
        raise FedfillError(
            f"{form}: on {len(raw):,} real samples the program's probabilities differ by up to {largest:.2g} from the model's, and its "
            f"scores by {of_scores:.2g} of their size; allowed: up to {CLOSE:g}; leave {form} out"
        )
    of_number = model.inputs.number is not None
    by_class = {} if of_number else {"largest_difference": largest, "same_class": same}
    return {
        "made_by": made_by,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "input": f"{str(raw.dtype).removeprefix('torch.')} {['n', *raw.shape[1:]]}".replace("'", ""),
        "output": "a number"
        if of_number
        else RANKS
        if model.ranks_only
        else "class scores; their softmax are the probabilities",
        "compared_on": len(raw),
        "largest_difference_of_scores": of_scores,
        **by_class,
    }


def _raw(inputs: Inputs, samples: Tensor) -> Tensor:
    """Stored inputs as a program takes them: a table's in its own units again."""
    if (columns := inputs.columns) is None:
        return samples
    k, values = len(columns.numbers), samples.to(torch.float64)
    mean, deviation = (values.new_tensor(numbers) for numbers in (columns.mean, columns.deviation))
    return torch.cat([values[:, :k] * deviation + mean, values[:, k:]], dim=1)


def _pt2(traced: Any, file: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    traced.example_inputs = None  # which it would keep as a pickle
    torch.export.save(traced, file)
    return torch.export.load(file).module(), f"torch {torch.__version__}"


def _onnx(traced: Any, file: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    import onnx
    import onnxruntime

    try:
        program = torch.onnx.export(
            traced, dynamo=True, verbose=False, external_data=False, input_names=["inputs"], output_names=["scores"]
        )
        assert program is not None
        program.save(file, external_data=False)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # an operation that ONNX or its runtime has not
        raise FedfillError(f"onnx: this network can't be written so ({first_line(error)}); allowed: pt2") from error
    name = session.get_inputs()[0].name
    return (
        lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0]),
        f"torch {torch.__version__}, onnx {onnx.__version__}",
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what tracers print and warn of on their way."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
