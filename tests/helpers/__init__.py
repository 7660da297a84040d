"""What several test files share: models, oracles, and programs that a test starts."""
