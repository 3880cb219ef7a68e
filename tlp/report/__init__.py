"""What people look at: tables, plots, progress."""
