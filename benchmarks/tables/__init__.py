"""Four published tables and one of short queries, over HTTP on loopback, for our stack and for its peers."""
