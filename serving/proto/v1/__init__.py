"""Version 1 of the gRPC interface: serving.proto, and the modules that `make proto` generates from it."""
