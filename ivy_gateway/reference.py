"""The gateway's half of the self-test: texts of the model's reference file must become the ids it holds.

The server's half, ids to vectors, is its own.
"""

from __future__ import annotations

import logging

import numpy as np

from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError
from ivy_gateway.tokenizer import TextTokenizer
from protos.reference import REFERENCE_FILE, BadReference, read_reference

logger = logging.getLogger(__name__)


def check_reference(config: GatewayConfig, tokenizer: TextTokenizer) -> None:
    """Raise `StartupError`, naming the first text whose ids differ, unless the configuration allows a gap.

    A model without a reference file passes; one with a broken file never does.
    """
    try:
        examples = read_reference(config.model)
    except BadReference as error:
        raise StartupError(str(error)) from error
    differing = [
        index
        for index, example in enumerate(examples)
        if not np.array_equal(tokenizer.ids_of(example.text), example.token_ids)
    ]
    if differing:
        message = (
            f"{REFERENCE_FILE}: text {differing[0]} has other ids here ({len(differing)} of {len(examples)}"
            " texts do): its vectors would not be those of the library that wrote the file"
        )
        if not config.allow_reference_gap:
            raise StartupError(f"{message}; --allow-reference-gap serves the model all the same")
        logger.warning(message)
