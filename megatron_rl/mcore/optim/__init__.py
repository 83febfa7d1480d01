"""The optimizer: data parallelism, the quantizing optimizer, learning rate, offloading, and the step response."""
