"""What clients may ask and how answers look, the same through every door: HTTP, gRPC and batch files."""
