"""Foreign tensors <-> ours."""
