"""The Gated Recurrent Transformer: architecture, tensor-parallel layers, recurrent core, gate, depth, noise and loss."""
