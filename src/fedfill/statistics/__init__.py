"""Sums over records: what is made of them, and what can be learned from them alone."""
