"""Illustrations for releases without a guarantee: how well records, and classes, are told from them. No bound follows from these."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedfill.data.samples import Samples, normalise
from fedfill.privacy.scores import halves, roc
from fedfill.protocol.messages import Message
from fedfill.tree import Weights


@torch.inference_mode()
def membership(model: nn.Module, weights: Weights, members: Samples, others: Samples) -> dict[str, Any] | None:
    """How much more often than by chance an attacker tells a client's records from new ones, by the loss of a model.

    Args:
        model: The network.
        weights: That the attacker sees.
        members: Records that it was trained on.
        others: Records of the same data set that it has never seen.

    Returns:
        ``advantage`` (hits less false alarms at a threshold that was learnt on half of the records), ``interval`` (of 95 %),
        ``area`` (under the curve) and ``records`` of each kind; None for fewer than eight.
    """
    model.load_state_dict(weights, strict=False)
    model.eval()
    n = min(len(members), len(others), 2000)
    if n < 8:
        return None

    def losses(data: Samples) -> Any:
        scores = model(normalise(data.inputs[:n]))
        return -functional.cross_entropy(scores, data.labels[:n], reduction="none").double().numpy()

    ins, outs = losses(members), losses(others)
    (learn_in, test_in), (learn_out, test_out) = halves(ins), halves(outs)
    places = np.unique(np.concatenate([learn_in, learn_out]))
    gains = [float((learn_in >= x).mean() - (learn_out >= x).mean()) for x in places]
    threshold = places[int(np.argmax(gains))]
    hits, alarms = float((test_in >= threshold).mean()), float((test_out >= threshold).mean())
    width = 1.96 * math.sqrt(hits * (1 - hits) / len(test_in) + alarms * (1 - alarms) / len(test_out))
    advantage = hits - alarms
    interval = [max(-1.0, advantage - width), min(1.0, advantage + width)]
    return {"advantage": advantage, "interval": interval, "area": roc(ins, outs)[0], "records": n}


def classes_told(message: Message, reply: Message, held: list[int], classes: int) -> float | None:
    """Which classes a client holds, told by how the bias of the last layer moved in its update.

    Args:
        message: With the weights that it started from.
        reply: With those that it trained.
        held: Its classes.
        classes: Of the task.

    Returns:
        The probability that a class which it holds moved up more than one which it doesn't; None where it holds all, or no such
        tensor was sent.
    """
    before, after = getattr(message, "weights", None), getattr(reply, "weights", None)
    if not isinstance(before, dict) or not isinstance(after, dict) or not 0 < len(held) < classes:
        return None
    last = [name for name, tensor in after.items() if tensor.shape == (classes,) and name in before]
    if not last:
        return None
    moved = (after[last[-1]].double() - before[last[-1]].double()).cpu().numpy()
    mine = np.isin(np.arange(classes), held)
    return roc(moved[mine], moved[~mine])[0]
