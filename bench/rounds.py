"""Whether memory grows with the number of rounds: the resident set of a run of 1,000 rounds, read every second.

``python bench/rounds.py`` runs FedAvg on digits, ten clients and one local epoch, with a checkpoint after every round,
in a process of its own. It prints the resident set after a few numbers of rounds, and the mean of the first and of the
last hundred rounds, without the first fifty, in which libraries still load, and the very end, where the summary is written.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def resident(pid: int) -> float:
    """Megabytes that a process has in memory; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--rounds", type=int, default=1_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        arguments = [
            options.algorithm, "--data", "digits", "--rounds", str(options.rounds), "--set", "local_epochs=1", "--out", str(out),
        ]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "fedfill", "run", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        seen: dict[int, float] = {}
        while process.poll() is None:
            time.sleep(1)
            record = out / "rounds.jsonl"
            if record.is_file() and (megabytes := resident(process.pid)):
                seen[record.read_bytes().count(b"\n")] = megabytes
        took = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(process.returncode)
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        done = min(seen, key=lambda done, share=share: abs(done - share * options.rounds))
        print(f"after {done} rounds: {seen[done]:.0f} MB")
    first = [size for done, size in seen.items() if 50 <= done < 150]
    last = [size for done, size in seen.items() if options.rounds - 100 <= done < options.rounds]
    print(
        f"rounds 50 to 150: {statistics.mean(first):.1f} MB; the last 100: {statistics.mean(last):.1f} MB; {took:.0f} s"
    )


if __name__ == "__main__":
    main()
