"""The network, its losses, its checkpoint directory and the predictor. Importing the submodules imports torch."""
