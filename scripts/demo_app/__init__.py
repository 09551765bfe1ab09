"""The parts of the demonstration, which scripts/demo runs."""
