"""Felix (ASPLOS 2024): a schedule's features as differentiable formulas in its tile factors, and a model over them."""
