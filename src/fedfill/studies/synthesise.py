"""Synthetic samples of a finished run as a file: to train on, to add to clients' data, to measure, to look at; a table as a table."""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedfill import __version__
from fedfill.data import sources, synthetic
from fedfill.data.dataset import Source
from fedfill.data.names import is_place
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.synthetic import Origin, Synthetic
from fedfill.engines.local import choose_device
from fedfill.errors import A_RUN, FedfillError, Kept, path_of
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.summary import Result
from fedfill.runs.directory import RunDirectory, write_atomically, writing
from fedfill.streams import derive
from fedfill.studies.finished import account_of, finished, made_by, noisy, require_count, require_maker
from fedfill.synthesis.measures import nearest

SHOWN = 10
"""Samples of each class in the picture."""
EACH = 500
"""Samples of each class that are made."""


@dataclass(frozen=True)
class Synthesised:
    """What `synthesise` made.

    Attributes:
        path: The file.
        samples: What it holds.
        origin: How they were made.
        picture: Beside it; None for samples that are no 8-bit images.
    """

    path: Path
    samples: Samples
    origin: Origin
    picture: Path | None

    def __repr__(self) -> str:
        """How many, and where they lie."""
        return f"<Synthesised: {len(self.samples):,} samples, in {self.path}>"


def synthesise(
    directory: str | Path | Kept, *, out: str | Path, per_class: int | None = None, against: str | Path | None = None,
    data_dir: str | Path | None = None, device: str | None = None,
) -> Synthesised:  # fmt: skip
    """Let a finished run make synthetic samples, and write them as a file with a picture.

    Example::

        fedfill.synthesise("runs/gauss", out="made.safetensors", per_class=100)

    Args:
        directory: The run directory, or what `fedfill.run` returned.
        out: The file, which ends in ``.safetensors``; the picture has its name with ``.png``. Of a run on a table with a schema also
            a file that ends in ``.parquet``: a table with the schema's columns, values drawn within their cells.
        per_class: So many of each class, from 1 to 100,000; fewer where the algorithm has a fixed set. None: 500, and of a ``.parquet`` file as
            many rows, in the shares, as the algorithm makes.
        against: A data set, by its name or its folder, whose nearest image the picture shows below each synthetic one: a public
            one, or one's own.
        data_dir: Another folder with the same data, and with those of `against`.
        device: Another device than the run's.

    Returns:
        The samples and where they lie. The same file, or picture, again is left as it is.

    Raises:
        FedfillError: Where the folder holds no finished run that makes such samples, a setting is out of range, or the file or
            its picture is there with other content.
    """
    path = path_of("out", out, f"a file that ends in {synthetic.SUFFIX}")
    as_table = path.suffix.lower() == synthetic.TABLE
    if not (as_table or synthetic.is_file(path.name)):
        raise FedfillError(f"out: found {path}; allowed: a file that ends in {synthetic.SUFFIX} or {synthetic.TABLE}")
    if per_class is None and not as_table:
        per_class = EACH
    if per_class is not None:
        require_count(per_class)
    place = RunDirectory(path_of("directory", directory, A_RUN))
    require_maker(place, "synthesise")
    run, result = finished(place, "synthesise", data_dir, device)
    schema, images = run.federation.schema, _are_images(run.federation.sample)
    if as_table and schema is None:
        raise FedfillError(
            f"out: found {path} of a run without a schema of a table; allowed: a file that ends in {synthetic.SUFFIX}"
        )
    if run.federation.of_numbers and not as_table:
        raise FedfillError(
            f"out: found {path} of a run whose target is a number; allowed: a file that ends in {synthetic.TABLE}"
        )
    if run.federation.of_numbers and per_class is not None:
        raise FedfillError(
            f"per_class: found {per_class} with {place.path}, whose target is a number and has no classes; allowed: none"
        )
    if against is not None and not images:
        raise FedfillError(
            f"against: found {against} with inputs of shape {list(run.federation.shape)}, which have no picture; allowed: none"
        )
    beside = None if against is None else _reference(against, data_dir, run)
    samples = made_by(run, place, "synthesise", choose_device(run.experiment.device), per_class).to("cpu")
    origin = _origin(run, result, per_class or 0)
    if as_table and schema is not None:
        data = _parquet(schema, samples, origin, run.experiment.seed)
    else:
        data = synthetic.to_bytes(Synthetic(samples, origin))
    picture = path.with_suffix(".png") if images else None
    files = {path: data} if picture is None else {path: data, picture: _drawn(samples, beside, origin)}
    for file, wanted in files.items():  # all are looked at before any is written
        with writing(file):
            if file.exists() and file.read_bytes() != wanted:
                raise FedfillError(f"out: {file} is there and holds something else; choose another name or remove it")
    for file, wanted in reversed(files.items()):  # the samples last: where they are, all is there
        if not file.exists():
            write_atomically(file, wanted)
    return Synthesised(path, samples, origin, picture)


def _origin(run: Prepared, result: Result, per_class: int) -> Origin:
    """How samples of a run were made: nothing of where it lies."""
    experiment, image_size = run.experiment, run.experiment.image_size
    account, name = account_of(experiment.model_dump(), result.summary, "these samples"), experiment.data
    secret, test_fraction = noisy(result.summary), experiment.test_fraction
    if synthetic.is_file(name):
        given = synthetic.read(synthetic.locate(name, experiment.data_dir)).origin
        name, image_size, test_fraction = given.data, given.image_size, given.test_fraction
    return Origin(
        class_names=run.federation.class_names,
        algorithm=experiment.algorithm,
        data=Path(name).name if is_place(name) else name,  # others need not know where it lay
        image_size=image_size,
        # who knows the seed can draw the noise again, and take it off; the digest tells whether a guess at the records is right
        seed=None if secret else experiment.seed,
        digest=None if secret else run.digest,
        version=__version__,
        per_class=per_class,
        epsilon=account["epsilon"],
        epsilon_added=account["epsilon_added"],
        delta=account["delta"],
        privacy=account["statement"],
        test_fraction=test_fraction,
    )


def _parquet(schema: Schema, samples: Samples, origin: Origin, seed: int) -> bytes:
    """A table by the schema, with how it was made in its metadata."""
    import pyarrow.parquet as pq

    draw = np.random.default_rng(derive(seed, "synthesise", "values"))
    table = schema.frame(schema.codes_of(samples.inputs, samples.labels), draw)
    told = {
        synthetic.KEY: json.dumps(origin.document(), sort_keys=True, allow_nan=False),
        synthetic.SCHEMA_KEY: schema.toml(),
    }
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(told), file, compression="zstd")
    return file.getvalue()


def _are_images(samples: Samples) -> bool:
    inputs = samples.inputs
    return inputs.dtype == torch.uint8 and inputs.dim() == 4 and inputs.shape[1] in (1, 3)


def _reference(against: str | Path, data_dir: str | Path | None, run: Prepared) -> Source:
    """The images that are shown beside: a data set by its name, or the one that lies in a folder."""
    folder, size = Path(against).expanduser(), run.experiment.image_size
    try:
        if folder.is_dir():
            source = sources.load(folder.resolve().name, folder.resolve().parent, size)
        else:
            source = sources.load(str(against), data_dir or run.experiment.data_dir, size)
    except FedfillError as error:
        words = str(error)  # of the setting that names a run's data, where it is about the name
        raise FedfillError(f"against{words[4:]}" if words.startswith("data:") else words) from None
    found, wanted = source.train.inputs, run.federation.test.inputs
    if found.shape[1:] != wanted.shape[1:] or found.dtype != wanted.dtype:
        raise FedfillError(
            f"against: {against} has {found.dtype} inputs of shape {list(found.shape[1:])}; allowed: {wanted.dtype} of shape "
            f"{list(wanted.shape[1:])}, as in the run"
        )
    return source


def _drawn(samples: Samples, beside: Source | None, origin: Origin) -> bytes:
    """The picture, as the bytes of a PNG file."""
    from fedfill.runs.pictures import image_grid  # here: matplotlib costs every start a third of a second

    classes = range(len(origin.class_names))
    first = torch.cat([(samples.labels == c).nonzero()[:SHOWN, 0] for c in classes])
    shown, below = samples[first], None
    if beside is not None:
        below = beside.train.inputs[nearest(shown.inputs, beside.train.inputs)[1]]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        image_grid(shown, origin.class_names, picture, SHOWN, below)
        return picture.read_bytes()
