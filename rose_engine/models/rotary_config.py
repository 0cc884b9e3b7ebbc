"""The rotary basis of a `config.json`, in the old layout (`rope_scaling`) and the new (`rope_parameters`).

What cannot be honoured is refused by name: a kind that depends on the sequence at hand (dynamic, longrope),
and a basis that turns only a part of each head.
"""

from __future__ import annotations

from collections.abc import Callable

from rose_engine.errors import CheckpointError
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
    yarn_magnitude,
)
from rose_engine.settings_file import SettingsFile

DEFAULT_THETA = 10_000.0


def read_rotary(config: SettingsFile, head_dim: int) -> RotarySpec:
    """The basis of a model that has one. `rope_scaling` wins where both layouts state the same key.

    Raises `CheckpointError` for a kind that is not supported, or a parameter that is missing or impossible.
    """
    parameters = merged(config, config.section("rope_parameters"), config.section("rope_scaling"))
    theta = config.optional("rope_theta", float, DEFAULT_THETA)
    return rotary_of(config, parameters, head_dim, theta)


def merged(config: SettingsFile, *sections: SettingsFile) -> SettingsFile:
    """The keys of all sections, later ones winning, with the kind's old key `type` under its new one."""
    values: dict[str, object] = {}
    for section in sections:
        values |= {"rope_type" if key == "type" else key: value for key, value in section.values.items()}
        if isinstance(kind := section.values.get("rope_type"), str):  # it wins over `type` beside it
            values["rope_type"] = kind
    return SettingsFile(config.path, values)


def rotary_of(config: SettingsFile, parameters: SettingsFile, head_dim: int, theta: float) -> RotarySpec:
    """The basis that `parameters` state; `theta` where they state none. Raises `CheckpointError`."""
    kind = parameters.optional("rope_type", str, "default")
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise CheckpointError(f"{config.path}: rotary type {kind!r} is not supported; supported are {known}")
    if parameters.optional("partial_rotary_factor", float, 1.0) != 1 or head_dim % 2:
        raise CheckpointError(f"{config.path}: rotation of a part of a head is not supported")
    return RotarySpec(
        head_dim=head_dim,
        theta=parameters.optional("rope_theta", float, theta),
        max_positions=config.required("max_position_embeddings", int),
        scaling=_SCALINGS[kind](config, parameters),
    )


def _no_scaling(config: SettingsFile, parameters: SettingsFile) -> None:  # noqa: ARG001 - as the others
    return None


def _linear(config: SettingsFile, parameters: SettingsFile) -> RotaryScaling:  # noqa: ARG001 - as the others
    return LinearScaling(_factor(parameters))


def _llama3(config: SettingsFile, parameters: SettingsFile) -> RotaryScaling:
    low = parameters.required("low_freq_factor", float)
    high = parameters.required("high_freq_factor", float)
    if low >= high:
        raise CheckpointError(f"{config.path}: low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(_factor(parameters), low, high, _original_positions(config, parameters))


def _yarn(config: SettingsFile, parameters: SettingsFile) -> RotaryScaling:
    factor = _factor(parameters)
    return YarnScaling(
        factor=factor,
        original_positions=_original_positions(config, parameters),
        magnitude=_yarn_magnitude(parameters, factor),
        beta_fast=parameters.optional("beta_fast", float, 32.0),
        beta_slow=parameters.optional("beta_slow", float, 1.0),
        whole_bounds=parameters.optional("truncate", bool, True),
    )


def _yarn_magnitude(parameters: SettingsFile, factor: float) -> float:
    """`attention_factor`; else the ratio of two corrections where both weights are given, else one."""
    stated = parameters.optional("attention_factor", float, None)
    weight = parameters.optional("mscale", float, None)
    weight_of_all = parameters.optional("mscale_all_dim", float, None)
    if stated is not None:
        return stated
    if weight and weight_of_all:
        return yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_of_all)
    return yarn_magnitude(factor)


def _factor(parameters: SettingsFile) -> float:
    factor = parameters.required("factor", float)
    if factor < 1:
        raise CheckpointError(f"{parameters.path}: rotary factor {factor} is below 1")
    return factor


def _original_positions(config: SettingsFile, parameters: SettingsFile) -> int:
    """Positions before the stretch; without a word about them, as many as the model has."""
    key = "original_max_position_embeddings"
    stated = config.optional(key, int, None) or parameters.optional(key, int, None)
    return stated or config.required("max_position_embeddings", int)


_SCALINGS: dict[str, Callable[[SettingsFile, SettingsFile], RotaryScaling | None]] = {
    "default": _no_scaling,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
