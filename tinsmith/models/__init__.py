"""Loading a base model, what differs between families, LoRA adapters, packed attention, tiny random models."""
