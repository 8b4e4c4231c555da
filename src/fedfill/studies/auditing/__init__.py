"""Attacks on releases: canaries, repeats and guesses, for `fedfill.audit`."""
