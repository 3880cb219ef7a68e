"""The stages of the loop (measure, train, tune, the tuning night, the demo), each with its lock, run row and report."""
