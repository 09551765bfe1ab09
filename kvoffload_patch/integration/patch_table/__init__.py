"""The table of patch points: what of vLLM is touched, per release. It knows no hook's code."""
