"""The benchmark of copies between GPU and CPU memory."""
