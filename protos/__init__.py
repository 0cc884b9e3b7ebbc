"""The protocol between the tiers: generated code (`protos.tulip.v1`), the byte codec, file fingerprints."""

import os

__version__ = "0.1.0"  # of the distribution: all tiers are released together

# gRPC reads this once, when it is imported, so both tiers import this package first. With its event engine a
# message changes threads more often on its way: `python -m benchmarks.hop` measures by how much.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"
os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
