"""How bytes move: copy backends, the kernels and driver calls that they use."""
