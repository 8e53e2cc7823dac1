"""The process that owns a device: base models, what is trained and sampled on them, and what runs beside the device."""
