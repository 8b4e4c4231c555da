"""What is learned from sums over all records."""
