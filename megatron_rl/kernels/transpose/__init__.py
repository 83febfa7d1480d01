"""Transposes the bytes of a weight. A version of the weights needs it once, so the rehearsal does not count it in each micro-batch."""
