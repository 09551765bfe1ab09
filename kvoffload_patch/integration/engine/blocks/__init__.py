"""Which GPU blocks are stored, kept recent, discarded; not which requests are admitted or wait."""
