"""The protocol between the tiers: generated code (`protos.tulip.v1`), the byte codec, file fingerprints."""
