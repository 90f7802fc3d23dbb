"""The Gated Recurrent Transformer: architecture, tensor-parallel layers, recurrent core, gate, depth, noise and loss."""

import warnings

# megatron-core says so several times at import, in every process; nothing here uses either.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
# megatron-core 0.16.1 announces that layers built without an explicit group will be refused one day.
warnings.filterwarnings("ignore", message=".*tp_group is None", category=DeprecationWarning)
# torch 2.13 renames collectives that deepspeed 0.19.8 calls.
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)
