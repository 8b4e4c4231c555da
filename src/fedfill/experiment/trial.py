"""Trials of a network on a few samples, so that a misfit shows before anything is written."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.data.samples import normalise
from fedfill.engines.runner import refuses_one_sample
from fedfill.errors import FedfillError, first_line
from fedfill.models.layers import draws_from
from fedfill.streams import torch_stream


def copied(model: nn.Module) -> nn.Module:
    """A user's own network once more, so that theirs stays as it is."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a foreign module may raise
        raise FedfillError(
            f"model: {type(model).__name__} can't be copied ({first_line(error)}); where it has "
            "torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm"
        ) from error


def require_fit(model: nn.Module, federation: Federation, batch_size: int) -> None:
    """Try a user's own network on a sample and on a mini-batch, so that a misfit shows before anything is written."""
    name = type(model).__name__
    try:
        with torch.inference_mode():
            found = list(model.eval()(normalise(federation.test.inputs[:1])).shape)  # a lazy layer gets its shape here
        trained = [client.train for client in federation.clients if len(client.train)]
        smallest = min(trained, key=len)[: max(batch_size, 2)]
        # two of one: whether batch norm ever meets a lone sample is for the algorithm and its data to say
        inputs = torch.cat([smallest.inputs, smallest.inputs]) if len(smallest) == 1 else smallest.inputs
        draws = torch.get_rng_state()
        trial = copy.deepcopy(model).train()
        with draws_from(trial, torch_stream(0, "trial")):
            scores = trial(normalise(inputs))
        drew = not torch.equal(draws, torch.get_rng_state())
        if scores.requires_grad:
            scores.sum().backward()
    except Exception as error:  # whatever a foreign module may raise
        raise FedfillError(
            f"model: {name} can't be evaluated on one sample of shape {list(federation.shape)} and trained on the mini-batch of the "
            f"smallest client ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    if found != [1, federation.classes]:
        raise FedfillError(
            f"model: {name} makes scores of shape {found} for one sample; allowed: [1, {federation.classes}], one for each class"
        )
    if not scores.requires_grad:
        raise FedfillError(
            f"model: {name} has nothing to train; allowed: at least one parameter that requires a gradient"
        )
    if drew:
        raise FedfillError(
            f"model: {name} draws from torch's global generator in training, so that results would depend on the number of workers; "
            "allowed: layers such as torch.nn.Dropout, which get a stream of their own"
        )
    hidden = {buffer for buffer, _ in model.named_buffers()} - model.state_dict().keys()
    if hidden:
        raise FedfillError(
            f"model: {name} keeps '{min(hidden)}' as a buffer outside its state dict, where one client would find what another left; "
            "allowed: persistent buffers"
        )


def with_lone_samples_noted(
    network: nn.Module, federation: Federation, settings: Algorithm, sample: torch.Tensor, spare: int
) -> Federation:
    """Look out for clients that train on one sample at a time, which a network with batch norm of single values can't do.

    Where a round may lose more than `spare` of them, that is refused; where it can go on without them, a note counts them.
    """
    sizes = {i: len(client.train) for i, client in enumerate(federation.clients) if len(client.train)}
    lone = [i for i, size in sizes.items() if min(size, settings.batch_size) == 1]
    if not lone or settings.buffers == "frozen" or settings.unlabelled:
        return federation
    trial = copy.deepcopy(network).train()
    try:
        with torch.no_grad(), draws_from(trial, torch_stream(0, "trial")):
            trial(normalise(sample))
        return federation
    except Exception as error:  # whatever a foreign module may raise
        if not refuses_one_sample(error):
            raise FedfillError(
                f"model: {type(network).__name__} can't be trained on one sample ({first_line(error)}), and client "
                f"{federation.client_names[lone[0]]} has mini-batches of one; allowed: two samples or more for each"
            ) from error
    some = ", ".join(federation.client_names[i] for i in lone[:3]) + (", ..." if len(lone) > 3 else "")
    found = (
        "batch_size=1"
        if settings.batch_size == 1
        else f"clients with one training sample: {len(lone)} of {len(sizes)} ({some})"
    )
    helps = "buffers=frozen, or a network without batch norm of single values, such as --model cnn2 for images"
    if len(lone) > spare and not any(len(client.unlabelled) for client in federation.clients):
        raise FedfillError(
            f"model: the batch norm of this network can't be trained on one sample; found {found}; allowed: two "
            f"samples or more for each client and mini-batch (data_fraction, labelled_per_client and the partition decide on them), {helps}"
        )
    note = (
        f"On one labelled sample at a time the batch norm of this network can't be trained: {found}. Where a client has "
        f"nothing else to train on, its reply is lost; what helps: {helps}."
    )
    return replace(federation, notes=(*federation.notes, note))
