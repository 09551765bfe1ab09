"""A module for each kind of device; `transfer/device.py` says what they offer."""
