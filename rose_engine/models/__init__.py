"""Model families: a short file each, that names its differences over the shared layers."""
