"""The real scheduler against a model of the device: traces in, latencies of every request out. Imports no JAX."""
