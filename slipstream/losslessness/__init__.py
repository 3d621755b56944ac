"""The losslessness certificate: what two engines draw, what the exact policy says about it, and the verdict."""
