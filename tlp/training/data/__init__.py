"""From the store to arrays: snapshot, hold-out, data set."""
