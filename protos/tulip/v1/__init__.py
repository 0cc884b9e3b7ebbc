"""Generated from `inference.proto` by `make protos`."""
