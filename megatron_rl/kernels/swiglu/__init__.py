"""SwiGLU, and SwiGLU that quantizes its result."""
