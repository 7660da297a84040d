"""The evidence: every method on pretrained checkpoints, without fine-tuning."""
