"""Ragged attention behind one interface; SDPA is the reference."""
