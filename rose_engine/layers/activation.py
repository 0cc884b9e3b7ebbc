"""Activations by the name that a model's files give them; never by importing what a file names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rose_engine.errors import CheckpointError

Activation = Callable[[Tensor], Tensor]


def identity(values: Tensor) -> Tensor:
    """What came in."""
    return values


# `hidden_act` in config.json. "gelu" is the exact one, with erf.
_HIDDEN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

# Classes of torch.nn that sentence-transformers modules name, with their default arguments.
_TORCH_CLASSES: dict[str, Activation] = {
    "ELU": F.elu,
    "GELU": F.gelu,
    "Identity": identity,
    "LeakyReLU": F.leaky_relu,
    "ReLU": F.relu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Tanh": torch.tanh,
}


def hidden_activation(name: str) -> Activation:
    """The activation that `hidden_act` names. Raises `CheckpointError` listing what is known."""
    return _look_up(_HIDDEN_ACTIVATIONS, name, name)


def torch_activation(dotted_class: str) -> Activation:
    """The activation of a class such as `torch.nn.modules.activation.Tanh`. Raises `CheckpointError`."""
    package, _, class_name = dotted_class.rpartition(".")
    known = package == "torch.nn" or package.startswith("torch.nn.modules")
    return _look_up(_TORCH_CLASSES, class_name if known else "", dotted_class)


def _look_up(table: dict[str, Activation], key: str, shown: str) -> Activation:
    if key not in table:
        raise CheckpointError(f"activation {shown!r} is not supported; supported are {', '.join(table)}")
    return table[key]
