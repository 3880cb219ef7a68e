"""What the devices do: runs, locks, states, live quality, and how many programs may be asked for."""
