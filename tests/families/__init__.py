"""Every family of transformers: built tiny, checked, and listed in docs/FAMILIES.md."""
