"""What runs on a device: Triton kernels, the PyTorch code that stands in for them, and `dispatch.py`, which chooses."""
