"""Measurements, and what they share."""
