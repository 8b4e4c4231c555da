"""Local training, aggregation and evaluation."""
