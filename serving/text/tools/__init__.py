"""Tool calls in output text, one module for formats of a kind."""
