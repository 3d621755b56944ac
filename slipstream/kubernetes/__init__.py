"""Profiles of Kubernetes clusters, the pods of a run, and the checks before a launch."""
