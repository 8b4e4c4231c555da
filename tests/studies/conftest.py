"""The runs of the tests of `experiment` serve here too."""

from tests.experiment.conftest import stopped, whole

__all__ = ["stopped", "whole"]
