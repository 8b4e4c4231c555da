"""The contract between algorithms and engines, and the engines."""
