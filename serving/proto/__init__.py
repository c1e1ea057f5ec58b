"""Protocol buffers of the gRPC interface."""
