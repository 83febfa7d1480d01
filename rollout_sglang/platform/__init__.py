"""SGLang on a CPU: its platform class and stand-ins for GPU packages."""
