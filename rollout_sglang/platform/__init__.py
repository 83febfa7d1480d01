"""SGLang on a CPU: its platform class, and stub modules for GPU packages."""
