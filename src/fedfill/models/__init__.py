"""Networks, their parts, and views of their tensors."""
