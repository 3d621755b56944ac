"""What a Kubernetes cluster offers a run, and the pods that a run asks of it."""
