"""Ivy: the HTTP gateway; templates, tokenizes, splits into chunks, balances them over replicas. No torch."""
