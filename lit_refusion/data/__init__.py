"""Records -> shards -> plan -> batches."""
