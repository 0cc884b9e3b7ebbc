"""Tulip: the gRPC server beside each device; first-come-first-served batches, two in flight."""

import protos as protos  # before anything imports gRPC: see there
