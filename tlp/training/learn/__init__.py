"""How models learn: strategies, the training loop, small trees."""
