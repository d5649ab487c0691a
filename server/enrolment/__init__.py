"""Which devices may connect: authority, registry, certificates."""
