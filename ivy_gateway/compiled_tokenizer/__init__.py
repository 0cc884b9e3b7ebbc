"""The gateway's encoder for Unigram, WordPiece and byte-level BPE: a compiled extension, equal in every id.

`encoder.fast_encoder` makes one for a `tokenizers` object, or says why it cannot: where the extension was not
built, where the pipeline is another one, where a probe gave other ids. Then the library encodes.
"""
