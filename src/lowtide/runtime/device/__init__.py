"""Memory meters and offload tiers of host and accelerator."""
