"""The cost of synthetic images: inversion beside local training, GANs beside a bare loop; ``python bench/synthesis.py``.

Variants alternate in one process, and figures are medians. Inversions are timed over a few steps: each step costs the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from fedfill.data.samples import Batch, Samples, normalise
from fedfill.engines.allocator import keep_freed_memory
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.privacy.keyed import seeded
from fedfill.streams import torch_stream
from fedfill.synthesis import gan
from fedfill.synthesis.gan_networks import Critic, GANSettings, Generator
from fedfill.synthesis.inversion import Inversion, invert
from fedfill.training.fit import Context, Fit, LocalTraining, fit
from fedfill.training.losses import cross_entropy

SHAPE, CLASSES, STEPS = (1, 28, 28), 10, 4


def images(n: int) -> Samples:
    """Noise with labels: the arithmetic doesn't care."""
    stream = torch_stream(0, "bench")
    inputs = torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8, generator=stream)
    return Samples(inputs, torch.randint(CLASSES, (n,), generator=stream))


def alternate(variants: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Median seconds of each variant, all of them in turn, after one turn to warm up."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(times + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if turn:
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def inversion(times: int) -> list[str]:
    """Fed-ZDA's works: a client of 400 images, E = 5, B = 10; 64 images of each class in 200 steps; ten models."""
    nets = [build("cnn2bn", SHAPE, CLASSES, ModelSettings(), seed=seed).eval() for seed in range(10)]
    resident = make_resident(nets[0], torch.device("cpu"))
    weights, data = weights_of(nets[0]), images(400)
    training = LocalTraining(epochs=5, batch_size=10, optimizer="sgd", learning_rate=0.02)
    few = Inversion(per_class=64, steps=STEPS)

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model, batch)

    def local() -> None:
        fit(resident, Fit(weights, loss, data, training), torch_stream(0, "a"), torch_stream(0, "b"))

    def inverted(classes: range, settings: Inversion = few, seed: int = 0) -> None:
        model = resident.load(weights_of(nets[seed])).eval()
        invert(model, classes, data[:1], settings, torch_stream(seed, "c"))

    small = Inversion(per_class=16, steps=STEPS)
    seconds = alternate(
        {
            "local": local,
            "joint": lambda: inverted(range(CLASSES)),
            "by class": lambda: [inverted(range(c, c + 1)) for c in range(CLASSES)],
            "ten, one by one": lambda: [inverted(range(CLASSES), small, seed) for seed in range(10)],
            "ten, stacked": lambda: stacked(nets, 16),
        },
        times,
    )
    whole = 200 / (STEPS + 1)  # a step more than that is evaluated
    made = seconds["joint"] * whole
    return [
        f"local training of a client, 400 images, E=5, B=10: {seconds['local']:.2f} s",
        f"inversion, 64 images of each of 10 classes, 200 steps: {made:.1f} s, {made / seconds['local']:.0f} times as long",
        f"the same class by class: {seconds['by class'] / seconds['joint']:.2f} times the joint batch",
        f"ten clients that invert the same model: {10 * made:.0f} s, and {made:.0f} s where the server sends one set (or with reuse_rounds=10)",
        f"ten models, 16 images of each class, stacked by vmap: {seconds['ten, stacked'] / seconds['ten, one by one']:.2f} times one after another",
    ]


def stacked(nets: list[nn.Module], per_class: int) -> None:
    """The inversion of several models as one program: each layer a grouped convolution."""
    parameters, buffers = stack_module_state(nets)
    layers = {name: layer for name, layer in nets[0].named_modules() if isinstance(layer, nn.BatchNorm2d)}
    labels = torch.arange(CLASSES).repeat_interleave(per_class)
    pixels = torch.randn(len(nets), len(labels), *SHAPE, generator=torch_stream(0, "d")).requires_grad_()
    optimizer = torch.optim.Adam([pixels], 0.1)

    def objective(weights: dict[str, Tensor], kept: dict[str, Tensor], x: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
                z = given[0].transpose(0, 1).flatten(1)  # [channels, b * positions]
                spread = (z.var(1, correction=0) + layer.eps).sqrt() - (kept[f"{name}.running_var"] + layer.eps).sqrt()
                seen.append((z.mean(1) - kept[f"{name}.running_mean"]).square().sum() + spread.square().sum())

            return hook

        hooks = [layer.register_forward_pre_hook(look(name)) for name, layer in layers.items()]
        scores = functional_call(nets[0], (weights, kept), (x,))
        for hook in hooks:
            hook.remove()
        return functional.cross_entropy(scores, labels) + torch.stack(seen).sum()

    for _ in range(STEPS + 1):
        loss = vmap(objective)(parameters, buffers, pixels).sum()
        (pixels.grad,) = torch.autograd.grad(loss, pixels)
        optimizer.step()
        with torch.no_grad():
            pixels.clamp_(-1, 1)


def gans(times: int, width: int) -> list[str]:
    """A client's GAN: 5 steps of the critic and one of the generator, mini-batches of 64."""
    settings = GANSettings(width=width)
    private = replace(settings, noise="dpsgd", clip=1.0)
    data = images(6000)
    begin = gan.start(SHAPE, settings, torch_stream(0, "start"))

    def train(how: GANSettings) -> None:
        gan.train(begin, data, 2, how, torch_stream(0, "e"), seeded(0, "f"), 1.0)

    seconds = alternate(
        {
            "bare": lambda: bare(begin, data, settings, 2),
            "fedfill": lambda: train(settings),
            "dpsgd": lambda: train(private),
        },
        times,
    )
    rate = 2 * settings.critic_steps * settings.batch_size / seconds["fedfill"]
    return [
        f"WGAN-GP of width {width}, {rate:.0f} real images per second and thread; to the bare loop {seconds['fedfill'] / seconds['bare']:.2f}",
        f"with DP-SGD on the critic: {seconds['dpsgd'] / seconds['fedfill']:.2f} times as long",
    ]


def bare(begin: gan.GAN, data: Samples, settings: GANSettings, iterations: int) -> None:
    """The same arithmetic as plainly as it can be written."""
    generator, critic = networks(begin, settings, torch.device("cpu"))
    adams = [torch.optim.Adam(m.parameters(), 1e-4, betas=(0.0, 0.9), fused=True) for m in (generator, critic)]
    real = normalise(data.inputs)
    b = settings.batch_size
    for _ in range(iterations):
        for _ in range(settings.critic_steps):
            x = real[torch.randint(len(real), (b,))]
            with torch.no_grad():
                fake = generator(torch.randn(b, settings.latent))
            share = torch.rand(b, 1, 1, 1)
            between = (share * x + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between)[0].sum(), between, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = critic(fake)[0].mean() - critic(x)[0].mean() + 10 * penalty
            adams[1].zero_grad()
            loss.backward()
            adams[1].step()
        loss = -critic(generator(torch.randn(b, settings.latent)))[0].mean()
        adams[0].zero_grad()
        loss.backward(inputs=list(generator.parameters()))
        adams[0].step()


def networks(begin: gan.GAN, settings: GANSettings, device: torch.device) -> tuple[Generator, Critic]:
    """Generator and critic of a GAN, in training mode."""
    generator, critic = Generator(SHAPE, settings), Critic(SHAPE, settings)
    generator.load_state_dict(begin.generator)
    critic.load_state_dict(begin.critic)
    return generator.to(device), critic.to(device)


def ten_gans(times: int, width: int, device: torch.device) -> str:
    """Ten clients' GANs one after another, as fedfill trains them on one device, and as one program."""
    settings = GANSettings(width=width)
    data = images(6000).to(device)
    begins = [gan.start(SHAPE, settings, torch_stream(k, "start")) for k in range(10)]

    def waited(run: Callable[[], object]) -> Callable[[], None]:
        def both() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return both

    def one_by_one() -> None:
        for k, begin in enumerate(begins):
            gan.train(begin, data, 2, settings, torch_stream(k, "e", device=device), seeded(k, "f", device=device))

    seconds = alternate(
        {"one by one": waited(one_by_one), "stacked": waited(lambda: stacked_gans(begins, data, settings, 2))}, times
    )
    rate = 20 * settings.critic_steps * settings.batch_size / seconds["one by one"]
    ratio = seconds["stacked"] / seconds["one by one"]
    return f"ten GANs of width {width} on {device.type}: {rate:.0f} real images per second; stacked by vmap: {ratio:.2f} times as long"


def stacked_gans(begins: list[gan.GAN], data: Samples, settings: GANSettings, iterations: int) -> tuple[Tensor, ...]:
    """The GANs of several clients as one program: each layer a grouped convolution; returns the generators' parameters."""
    device = data.labels.device
    pairs = [networks(begin, settings, device) for begin in begins]
    generator, critic = pairs[0]
    made_by, statistics_of = stack_module_state([pair[0] for pair in pairs])
    scored_by, _ = stack_module_state([pair[1] for pair in pairs])
    adams = [torch.optim.Adam(w.values(), 1e-4, betas=(0.0, 0.9), fused=True) for w in (made_by, scored_by)]
    real = normalise(data.inputs)
    k, b = len(begins), settings.batch_size

    def make(z: Tensor) -> Tensor:  # [k, b, latent] to [k, b, ...]
        return vmap(lambda w, s, z: functional_call(generator, (w, s), (z,)))(made_by, statistics_of, z)

    def score(x: Tensor) -> Tensor:  # [k, b, ...] to [k, b]
        return vmap(lambda w, x: functional_call(critic, w, (x,))[0])(scored_by, x)

    for _ in range(iterations):
        for _ in range(settings.critic_steps):
            x = real[torch.randint(len(real), (k, b), device=device)]
            with torch.no_grad():
                fake = make(torch.randn(k, b, settings.latent, device=device))
            share = torch.rand(k, b, 1, 1, 1, device=device)
            between = (share * x + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
            penalty = (slope.flatten(2).norm(dim=2) - 1).square().mean(1)
            scores = score(torch.cat([fake, x], 1))
            loss = scores[:, :b].mean(1) - scores[:, b:].mean(1) + 10 * penalty
            adams[1].zero_grad()
            loss.sum().backward()
            adams[1].step()
        loss = -score(make(torch.randn(k, b, settings.latent, device=device))).mean(1)
        adams[0].zero_grad()
        loss.sum().backward(inputs=list(made_by.values()))
        adams[0].step()
    return tuple(made_by.values())


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="timed turns")
    parser.add_argument("--width", type=int, default=16, help="of the GAN")
    parser.add_argument("--device", default="cpu", help="of the ten GANs; the rest is timed on the processor")
    parser.add_argument("--only-gans", action="store_true", help="time the ten GANs alone")
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    if not given.only_gans:
        for line in (*inversion(given.times), *gans(given.times, given.width)):
            print(line)
    print(ten_gans(given.times, given.width, torch.device(given.device)))


if __name__ == "__main__":
    main()
