"""What comes after the trunk: pooling for embeddings, classification for scores."""
