"""The cost of feature maps: all features of a data set's images; ``python bench/features.py --data-dir DIR``.

As the engines do: threads over chunks of images, with one torch thread each, on one map for all.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedfill.data.samples import normalise
from fedfill.data.sources import load
from fedfill.engines.allocator import keep_freed_memory
from fedfill.models.features import FeatureMap, features

MAPS = (
    "conv(200) > project(2048)",
    "patches(300) > project(2048)",
    "conv(200) > project(1024)",
    "scatter > project(1024)",
)


def all_features(encoder: FeatureMap, size: int, images: Tensor, threads: int, chunk: int = 500) -> Tensor:
    """``[n, size]`` of ``[n, channels, height, width]`` uint8."""
    out = torch.empty(len(images), size)

    def one(start: int) -> None:
        out[start : start + chunk] = encoder(normalise(images[start : start + chunk]))

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(one, range(0, len(images), chunk)))
    return out


def peak() -> float:
    """GB of this process, at most until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print a line for each map."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="folder with the data set")
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--images", type=int, default=6000, help="how many to time; more than there are: all")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--maps", nargs="*", default=MAPS)
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    data = load(given.data, given.data_dir).train.inputs
    images, before = data[: given.images], peak()
    print(
        f"{len(images):,} of {len(data):,} images {list(images.shape[1:])}, {given.threads} threads; {before:.2f} GB before"
    )
    for words in given.maps:
        start = time.perf_counter()
        encoder, size = features(words, tuple(images.shape[1:]), 0)
        made = time.perf_counter() - start
        all_features(encoder, size, images[:1000], given.threads)  # warms up
        start, busy = time.perf_counter(), time.process_time()
        all_features(encoder, size, images, given.threads)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        rate = len(images) / seconds
        print(
            f"{words}: made in {made:.1f} s; {rate:,.0f} images per second, {seconds:.1f} s, {60000 / rate:.1f} s for 60,000, "
            f"or {60000 * busy / len(images) / given.threads:.1f} s on idle processors; {peak():.2f} GB at the peak"
        )


if __name__ == "__main__":
    main()
