"""Bundled retrieval policies, one per module. `crl.config.retrieval` finds them by name."""
