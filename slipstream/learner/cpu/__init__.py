"""Parts that only a host without CUDA needs. Nothing in here does anything when CUDA is present."""
