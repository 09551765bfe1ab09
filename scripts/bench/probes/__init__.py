"""Measurements of single facts that the design rests on."""
