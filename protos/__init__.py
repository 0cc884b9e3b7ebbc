"""The protocol between the tiers: generated code (`protos.tulip.v1`), the byte codec, file fingerprints."""

__version__ = "0.1.0"  # of the distribution: all tiers are released together
