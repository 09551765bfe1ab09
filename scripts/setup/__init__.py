"""What makes the environment that scripts/demo and scripts/test run in."""
