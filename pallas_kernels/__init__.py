"""Attention over pages and KV writes. Knows arrays only."""
