"""The run directory and its pictures."""
