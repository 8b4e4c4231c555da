"""What is released, and what it costs."""
