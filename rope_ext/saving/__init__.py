"""How a patch is written into a model's configuration."""
