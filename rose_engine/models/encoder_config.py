"""What the families of encoders read alike from their `config.json`."""

from __future__ import annotations

from rose_engine.attention.base import AttentionSpec
from rose_engine.errors import CheckpointError
from rose_engine.settings_file import SettingsFile

FULL = (-1, -1)


def attention_spec(
    config: SettingsFile, width: int, num_heads: int, window: tuple[int, int] = FULL, *, biased: bool = False
) -> AttentionSpec:
    """Attention of `num_heads` heads that share `width`, scaled by the root of theirs.

    Raises `CheckpointError` when they do not divide it, or `head_dim` says otherwise.
    """
    if width % num_heads:
        raise CheckpointError(f"{config.path}: {num_heads} heads do not divide a width of {width}")
    head_dim = width // num_heads
    require(config, head_dim=head_dim)
    return AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, window, biased)


def require(config: SettingsFile, **supported: object) -> None:
    """Raises `CheckpointError` for a key of `config` that holds another value; an absent one is fine."""
    for key, wanted in supported.items():
        stated = config.values.get(key)
        if stated is not None and stated != wanted:
            raise CheckpointError(f"{config.path}: {key} {stated!r} is not supported, only {wanted!r}")
