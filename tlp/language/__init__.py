"""Schedule primitives as a language: sketches, decisions, vocabulary, encoders."""
