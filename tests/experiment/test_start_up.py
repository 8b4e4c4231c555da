"""What a process imports before its first mini-batch: seconds that everyone waits for. And names, which lazy imports may clash on."""

import subprocess
import sys

RUN = """
import sys
import fedfill
fedfill.run("fedavg", data="digits", data_fraction=0.1, clients=2, rounds=1, local_epochs=1, quiet=True)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_run_imports_its_own_algorithm_and_nothing_that_is_slow() -> None:
    done = run(RUN + "print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    # torch's compiler comes with its classes of optimizers, pandas with scikit-learn
    assert not found & {"torch._dynamo", "sklearn", "scipy.stats", "pandas", "matplotlib", "flwr", "ray"}
    files = {name.split(".")[2] for name in found if name.startswith("fedfill.algorithms.")}
    assert {name for name in files if not name.startswith("_")} == {"fedavg"}


def test_a_name_of_fedfills_is_taken_for_everyone_else() -> None:
    code = """
import os
from fedfill.algorithms import Algorithm, known_algorithms
for taken in ("fedprox", "fedzdac", "sdafl-ac"):
    if os.fork() == 0:  # so that each is the first that looks for all algorithms
        try:
            type("Mine", (Algorithm,), {"name": taken, "__module__": "__main__"})
            known_algorithms()
        except BaseException as error:
            print(taken, error, flush=True)
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3, taken
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 3
    for name, line in zip(("fedprox", "fedzdac", "sdafl-ac"), told, strict=True):
        assert f"the name '{name}' of Mine is taken by " in line


def test_the_digits_are_the_same_without_the_file_of_scikit_learn() -> None:
    code = """
import importlib.util
from fedfill.data import sources
from fedfill.tree import sha256
own = sources.load("digits").train
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "sklearn" else find(name)
sources._load.cache_clear()
again = sources.load("digits").train
assert own is not again
assert sha256({"x": own.inputs, "y": own.labels}) == sha256({"x": again.inputs, "y": again.labels})
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
