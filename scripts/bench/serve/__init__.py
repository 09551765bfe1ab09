"""The benchmark of whole engines under load."""
