"""Calls that a type checker takes, and those with `# wrong` behind them that it refuses; read by test_types.py, never run."""

from typing import assert_type

import numpy as np
from torch import nn

import fedfill
from fedfill.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    name = "mine"
    step: float = 1.0


class Net(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


result = fedfill.run("fedavg", data="digits", partition="dirichlet:0.5", clients=10, rounds=20, seed=0)
assert_type(result, fedfill.Result)
fedfill.run("fedprox", mu=0.1, local_epochs=1, optimizer="sgd", momentum=0.9, head="ccvr", latent_activation="none")
fedfill.run("fedavg", aggregation=Mine(step=0.5), partition=[[0, 1], [2, 3]], model=Net, quiet=True)
fedfill.run(Mine, step=0.5, rounds=1, model=nn.Linear(1, 1))
fedfill.run("fedavg", roundz=3)  # wrong
fedfill.run("fedavg", rounds="many")  # wrong
fedfill.run("fedavg", optimizer="adm")  # wrong
fedfill.run("fedavg", model=3)  # wrong
fedfill.run(3)  # wrong

comparison = fedfill.compare(["fedavg", Mine, "fedprox:mu=0.1"], seeds=[0, 1], rounds=2, batch_size=32)
assert_type(comparison, fedfill.Comparison)
fedfill.compare(["fedavg"], seed=3)  # wrong
fedfill.compare(["fedavg"], local_epoch=3)  # wrong
fedfill.compare([3])  # wrong

fedfill.resume("runs/x", rounds=30, workers=2, min_replies=3, algorithm="my.py:Mine", start_from="runs/y")
fedfill.resume("runs/x", learning_rate=0.1)  # wrong
fedfill.resume("runs/x", workers="2")  # wrong

fedfill.measure("runs/x", per_class=10, ceiling=True)
fedfill.measure("runs/x", per_clas=10)  # wrong
fedfill.synthesise("runs/x", out="x.safetensors", per_class=10)
fedfill.synthesise("runs/x", per_class=10)  # wrong

fedfill.study(data="./photos", partition="dirichlet:0.3", clients=8, budget="10m", batch_size=32)
fedfill.study(budgets="10m")  # wrong
fedfill.export("runs/x", onnx=True)
fedfill.export("runs/x", onx=True)  # wrong
fedfill.predict("runs/x", ["a.png"], client="0")
fedfill.predict("runs/x", ["a.png"], klient="0")  # wrong
