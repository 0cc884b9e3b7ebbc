"""Tulip: the gRPC server beside each device; first-come-first-served batches, two in flight."""
