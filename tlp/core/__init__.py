"""What every room stands on: settings, errors, progress, processes, files, and the seams of the registry."""
