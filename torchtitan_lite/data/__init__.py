"""Data: text -> tokens -> shards on disk -> rows -> each rank's share of each global batch."""
