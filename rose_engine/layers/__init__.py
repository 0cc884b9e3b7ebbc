"""Blocks that model families share."""
