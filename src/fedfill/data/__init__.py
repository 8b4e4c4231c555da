"""Data: sources, partitions, and the samples that clients hold."""
