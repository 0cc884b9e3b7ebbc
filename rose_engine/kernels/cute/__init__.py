"""GEMMs with a decoder layer's epilogues, in the CuTe DSL: an optional toolchain, imported late."""
