"""Fitting the cost model to measured generation times: the published ones, or those of a run of our own."""
