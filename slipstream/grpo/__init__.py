"""Group-relative policy optimization as pure functions of tensors and arrays."""
