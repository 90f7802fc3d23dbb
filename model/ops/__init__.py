"""The gate operators of a recurrence: plain PyTorch, and fused in a library of our own."""
