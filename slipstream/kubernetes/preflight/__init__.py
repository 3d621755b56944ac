"""What a cluster lacks, asked before a run waits for it: of the Kubernetes API, of MLflow, and of a pod.

needs      what a run asks for, in plain values
checks     every check in turn; each gives findings, and none raises because the cluster refuses or is silent
"""
