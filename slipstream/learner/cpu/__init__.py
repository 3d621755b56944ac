"""Modules that only a host without CUDA needs; none has an effect where CUDA is present."""
