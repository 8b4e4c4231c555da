"""Bounded sums over records, and what follows from them: features, heads, calibration."""
