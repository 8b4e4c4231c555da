"""Engines carry messages between server and clients; an algorithm never knows which."""

from importlib.util import find_spec

from fedfill.errors import FedfillError, did_you_mean

NAMES = {
    "local": "one process on this machine",
    "ray": "a simulation on a Ray cluster, or on a Ray of its own on this machine (extra: ray)",
    "flower": "a real federation on Flower; 'fedfill run' rehearses it on this machine (extra: flower)",
}
_PACKAGES = {"ray": "ray", "flower": "flwr"}


def require(name: str) -> None:
    """Make sure that an engine exists and that what it needs is installed."""
    if name not in NAMES:
        raise FedfillError(f"engine: unknown name '{name}'; {did_you_mean(name, NAMES)}")
    if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
        raise FedfillError(
            f"engine: '{name}' needs a package that is not installed; run: pip install 'fedfill[{name}]'"
        )
