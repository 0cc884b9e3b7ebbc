"""Token ids of OpenAI's models, turned back into the text that they stand for.

Clients that believe they talk to OpenAI send these (LangChain does so by default). Knows nothing of the
served model's own ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ivy_gateway.errors import InvalidValue, StartupError
from ivy_gateway.jobs import TokenIds

if TYPE_CHECKING:
    from tiktoken import Encoding


class ForeignVocabulary:
    """A vocabulary of the library tiktoken. Make it by `load`."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    @classmethod
    def load(cls, name: str) -> ForeignVocabulary:
        """The vocabulary called `name` (cl100k_base).

        Raises `StartupError` where the library is not installed, or neither has the file nor can fetch it.
        """
        try:
            import tiktoken
        except ImportError:
            raise StartupError(f"--token-ids {name} needs the package tiktoken") from None
        try:
            return cls(tiktoken.get_encoding(name))
        except Exception as error:  # whatever its download raises
            raise StartupError(
                f"--token-ids {name}: tiktoken has no such vocabulary file in the folder that"
                f" TIKTOKEN_CACHE_DIR names, and could not fetch it ({type(error).__name__})"
            ) from error

    def decode(self, ids: TokenIds, param: str) -> str:
        """The text of `ids`; what its ends cut out of a character becomes U+FFFD.

        Raises `InvalidValue`, naming `param`, for an id outside the vocabulary.
        """
        try:
            return self._encoding.decode(ids.token_ids.tolist(), errors="replace")
        except KeyError:
            name = self._encoding.name
            raise InvalidValue(f"`{param}` holds a token id that {name} does not have", param) from None
