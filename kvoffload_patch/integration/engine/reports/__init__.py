"""What the tier says of itself: figures, spans, the line in the log; it decides nothing."""
