"""Ivy: the HTTP gateway; templates, tokenizes, splits into chunks, balances them over replicas. No torch."""

import protos as protos  # before anything imports gRPC: see there
