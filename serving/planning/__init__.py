"""What hardware and a model allow, from formulas: before anything has been measured."""
