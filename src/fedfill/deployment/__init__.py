"""A real Flower federation, put to work on this host."""
