"""The algorithms with their defaults on digits: what a version's defaults give to someone who sets nothing.

Those that train GANs are left out: by default that takes many hours.

    python experiments/defaults/run.py RESULTS.json

A finished run is not made again. The same program runs on older versions, so that two of them can be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fedfill

ASKED: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.3", "clients": 5, "rounds": 10}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("fedavg", "fedprox", "scaffold", "moon", "feddyn", "fednova", "qffl", "dpfedavg")},
    **{name: {} for name in ("naivemix", "fedmix", "fedbn", "pfedavg", "partialfed", "fraug", "feddpms", "fedvae")},
    **{name: {} for name in ("fedzdac", "fedzdas", "local", "central")},
    **{name: {"labelled_per_client": 50} for name in ("fixmatch", "mixup", "semifl")},
}


def main() -> None:
    """Run all algorithms, three seeds each."""
    place = Path(sys.argv[1])
    found = json.loads(place.read_text()) if place.exists() else {}
    for name, options in OPTIONS.items():
        for seed in range(3):
            key = f"{name} {seed}"
            if key in found:
                continue
            try:
                result = fedfill.run(name, seed=seed, out=place.parent / "runs" / key, **ASKED, **options)
                summary = result.summary
                own = summary.get("mean_client_accuracy")
                found[key] = [summary["accuracy"], own, summary["seconds"]]
            except Exception as error:
                found[key] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            place.write_text(json.dumps(found, indent=1) + "\n")
            print(key, found[key], flush=True)


if __name__ == "__main__":
    main()
