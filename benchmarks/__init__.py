"""What is timed; tests never are."""
