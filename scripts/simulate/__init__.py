"""Replays request traces through the tier's own code, beside a modelled GPU cache and bus."""
