"""What is measured once, after the last round: figures that need the probabilities of all classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.data.schema_target import Target
from fedfill.statistics.survival import Pairs, concordance, total_hazard
from fedfill.training import regression
from fedfill.training.evaluation import in_chunks
from fedfill.training.fit import Resident
from fedfill.training.probabilities import FIGURES, auc, brier, calibration_error
from fedfill.tree import Weights

Judged = tuple[NDArray[Any], NDArray[np.float64]]
"""Labels ``[n]`` and probabilities ``[n, classes]`` of some samples; or numbers and what was predicted, ``[n]`` each."""


def quality(
    resident: Resident,
    federation: Federation,
    weights: Weights,
    own: Mapping[int, Weights] | None,
    device: torch.device,
) -> dict[str, Any]:
    """How good the probabilities of the final model are, or of everybody's own; or its numbers, where a number is learnt.

    Args:
        resident: A model, into which the weights are put.
        federation: With the test set, and the clients' own test splits.
        weights: Of the global model.
        own: Of personal models by client, without those that stay with their hosts; None: there are none. With them the test set is
            all own test splits together, each by its owner's model.
        device: Where the model lies.

    Returns:
        ``auc``, ``brier`` and ``calibration_error`` on the test set, and ``auc_within_clients``, the mean of the clients' own areas on
        their own test splits, by their samples: one that is high over all clients together may only know whose sample it is; the
        areas themselves are ``auc_by_client``, None for a client whose split is empty or has one class. Of numbers what `fedfill.training.regression.FIGURES` names. Of times to an event ``c_index`` and ``c_index_within_clients``, of
        pairs of rows of one client alone. None where nobody has samples for it.
    """
    by_client: dict[int, Judged] = {}
    for i, client in enumerate(federation.clients):
        if len(client.test) and (own is None or i in own):
            model = resident.load(weights if own is None else own[i]).eval()
            by_client[i] = _judged(model, client.test, device)
    splits = list(by_client.values())
    whole = _joined(splits)
    if own is None and len(federation.test):
        whole = _judged(resident.load(weights).eval(), federation.test, device)
    if whole is None:
        return dict.fromkeys(FIGURES)
    if (schema := federation.schema) is not None and federation.of_numbers:
        return _of_numbers(torch.from_numpy(whole[0]), torch.from_numpy(whole[1]), schema.target)
    if schema is not None and schema.target.kind == "survival":
        within = sum((_pairs(split, schema.target) for split in splits), Pairs(0.0, 0.0, 0.0))
        return {"c_index": _pairs(whole, schema.target).index, "c_index_within_clients": within.index}
    return {
        "auc": auc(*whole),
        "auc_within_clients": _within(splits),
        "auc_by_client": [auc(*by_client[i]) if i in by_client else None for i in range(len(federation.clients))],
        "brier": brier(*whole),
        "calibration_error": calibration_error(*whole),
    }


def _judged(model: torch.nn.Module, samples: Samples, device: torch.device) -> Judged:
    scores = in_chunks(model, samples.to(device)).double()  # [n, classes]
    if samples.of_numbers:
        return samples.labels.double().cpu().numpy(), scores[:, 0].cpu().numpy()
    return samples.labels.cpu().numpy(), scores.softmax(dim=1).cpu().numpy()


def _of_numbers(truth: Tensor, predicted: Tensor, target: Target) -> dict[str, float | None]:
    """How good predicted numbers are, in their own unit."""
    y, p = target.in_unit(truth), target.in_unit(predicted)
    slope, intercept = regression.calibration(p, y) or (None, None)
    return {
        "rmse": regression.rmse(p, y),
        "r2": regression.r_squared(p, y),
        "calibration_slope": slope,
        "calibration_intercept": intercept,
    }


def _pairs(judged: Judged, target: Target) -> Pairs:
    """How the hazards of a model rank rows."""
    labels, chances = map(torch.from_numpy, judged)
    return concordance(total_hazard(chances.clamp(min=1e-300).log()), labels, len(target.grid))


def _joined(splits: Sequence[Judged]) -> Judged | None:
    if not splits:
        return None
    labels, probabilities = zip(*splits, strict=True)
    return np.concatenate(labels), np.concatenate(probabilities)


def _within(splits: Sequence[Judged]) -> float | None:
    known = [(area, len(labels)) for labels, chances in splits if (area := auc(labels, chances)) is not None]
    if not known:
        return None
    areas, sizes = zip(*known, strict=True)
    return float(np.average(areas, weights=sizes))
