"""Orders the operations of the command log and gives them to workers. Holds no tensors."""
