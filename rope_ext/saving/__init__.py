"""What a saved model says of its patch: the record, and the configuration that carries it."""
