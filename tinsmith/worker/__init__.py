"""The process that owns a device, with its base models, and all that is trained and sampled on them."""
