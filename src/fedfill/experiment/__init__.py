"""One run: settings, preparation, the loop over rounds, its summary."""
