"""Group-relative policy optimisation: pure tensors in, tensors out."""
