"""What configurations and records say about RoPE and patches, read and written as JSON."""
