"""What a run writes as JSON, as its readers may rely on it: a file that was edited or torn is told by its name, with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from fedfill.errors import FedfillError

Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]
Score = Annotated[float, Field(le=1 + 1e-9, allow_inf_nan=False)]
"""A share that is recognised; where numbers are learnt R², which may be below 0; of times to an event the C-index."""
Number = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Checked(BaseModel):
    """A table of JSON: more may be in it, but nothing of another type, and no NaN."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Bytes(Checked):
    up: Count
    down: Count


class _Entry(Checked):
    epsilon: Number | None = None
    epsilon_added: Number | None = None
    conditional_epsilon: Number | None = None
    conditional_epsilon_added: Number | None = None
    conditions: list[str] = []


class _Account(Checked):
    entries: list[_Entry]
    total_epsilon: Number | None
    total_epsilon_added: Number | None = None
    delta: Number | None = None
    statement: str


class _Spent(Checked):
    total_epsilon: Number | None
    total_epsilon_added: Number | None = None
    entries: dict[str, Number | None] = {}


class _Figures(Checked):
    """Of a round that was evaluated, and of a whole run."""

    target: Literal["classes", "number", "survival"] = "classes"
    accuracy: Score
    loss: float | None = None
    accuracy_by_class: list[Score | None]
    accuracy_by_client: list[Score | None]
    mean_client_accuracy: Score | None
    worst_client_accuracy: Score | None
    worst_tenth_accuracy: Score | None = None
    accuracy_of_trained_head: Score | None = None
    client_variance: Number | None = None
    class_variance: Number | None = None
    largest_class: Share | None = None
    most_predicted: Share | None = None


class _Costs(Checked):
    bytes_up: Count
    bytes_down: Count
    train_samples: Count = 0
    seconds: Number
    warnings: list[str] = []


class _Table(Checked):
    title: str
    header: list[str]
    rows: list[list[str]]


class Summary(_Figures, _Costs):
    """The document of ``summary.json``."""

    accuracy: Score | None  # type: ignore[assignment]
    """None: the model says the same of every record, and is not scored."""
    algorithm: str
    dataset: str
    partition: str
    clients: Count
    rounds: Count
    seed: Count
    personal: bool = False
    rmse: Number | None = None
    r2: Score | None = None
    c_index: Share | None = None
    c_index_within_clients: Share | None = None
    balanced_accuracy: Score | None = None
    auc: Share | None = None
    auc_within_clients: Share | None = None
    brier: Share | None = None
    calibration_error: Share | None = None
    best_accuracy: Score | None = None
    best_round: Count | None = None
    selected_round: Count | None = None
    selected_validation: Score | None = None
    selected_accuracy: Score | None = None
    selected_mean_client_accuracy: Score | None = None
    own_test_samples: list[Count] | None = None
    client_names: list[str] | None = None
    bytes_by_handler: dict[str, _Bytes] = {}
    machine: str = ""
    weights_sha256: str
    lost_replies: Count = 0
    notes: list[str] = []
    tables: list[_Table] = []
    privacy: _Account

    @model_validator(mode="after")
    def _shares_of_classes(self) -> Summary:
        if self.target == "classes" and (self.accuracy or 0) < 0:
            raise ValueError("an accuracy below 0 is no share")
        return self

    @model_validator(mode="after")
    def _no_accuracy_only_without_scores(self) -> Summary:
        of_clients = any(share is not None for share in self.accuracy_by_client)
        if self.accuracy is None and (self.best_accuracy is not None or self.accuracy_by_class or of_clients):
            raise ValueError("an accuracy is missing beside scores of the same run")
        return self

    @model_validator(mode="after")
    def _a_size_for_each_client(self) -> Summary:
        if self.own_test_samples is not None and len(self.own_test_samples) != len(self.accuracy_by_client):
            raise ValueError("own_test_samples and accuracy_by_client are not of the same clients")
        if self.client_names is not None and len(self.client_names) != len(self.accuracy_by_client):
            raise ValueError("client_names and accuracy_by_client are not of the same clients")
        return self


class _Round(_Costs):
    round: Count
    privacy: _Spent
    lost: list[Any] = []


class _Judged(_Round, _Figures):
    """A round with an evaluation."""


class Division(Checked):
    """The document of ``partition.json``."""

    class_names: list[Annotated[str, StringConstraints(min_length=1)]] = Field(min_length=1)
    clients: list[list[Count]] | None
    domains: list[str] = []

    @model_validator(mode="after")
    def _a_count_for_each_class(self) -> Division:
        if any(len(row) != len(self.class_names) for row in self.clients or []):
            raise ValueError("a client's counts are not those of the classes")
        return self


_ROUND, _JUDGED = TypeAdapter(_Round), TypeAdapter(_Judged)


def require(kind: type[BaseModel], document: Any, path: Path, setting: str, hint: str) -> None:
    """Refuse a document that is not what a run wrote.

    Args:
        kind: What it should be.
        document: From JSON.
        path: The file.
        setting: What an error's sentence begins with.
        hint: What the user can do.

    Raises:
        FedfillError: Where it is none.
    """
    try:
        kind.model_validate(document)
    except ValidationError as error:
        raise FedfillError(f"{setting}: {path} is damaged ({first_fault(error)}); {hint}") from error


def require_rounds(records: list[dict[str, Any]], path: Path, setting: str, hint: str) -> None:
    """The same for the records of ``rounds.jsonl``."""
    for k, record in enumerate(records, 1):
        try:
            (_JUDGED if "accuracy" in record else _ROUND).validate_python(record)
        except ValidationError as error:
            raise FedfillError(f"{setting}: {path} is damaged (line {k}, {first_fault(error)}); {hint}") from error


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    words = first["msg"].removeprefix("Value error, ")
    return f"{place}: {words}" if place else words
