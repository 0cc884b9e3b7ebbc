"""ROSE: models, kernels and attention backends behind one call, `Engine.step(batch) -> LazyTensor`.

Knows nothing of text, gRPC or event loops.
"""
