"""From a store snapshot to a judged model version: data set, trainer, strategies, evaluation, gate, retraining."""
