"""Projections with bands, and the records and commands' results that they become."""
