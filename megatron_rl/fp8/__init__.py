"""FP8 numerics: the reference quantisers and the emulated products. Used by the trainer and by the engine's CPU kernels alike."""
