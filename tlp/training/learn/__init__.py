"""Learning: strategies, trainer, surrogate models."""
