"""What models learn from: data sets, labels, what is held out."""
