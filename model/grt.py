"""The Gated Recurrent Transformer: embedding, prelude, recurrent core, coda, tied head and loss in one module.

The loss is computed inside, so that ZeRO-3 sees every use of the tied embedding. A model without core blocks is a dense
transformer.

Shapes: S sequence, T this rank's part of it under sequence parallelism (else S), B batch, D hidden size, V padded vocabulary of
this tensor-parallel rank.
"""

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import attention_documents, document_positions
from model.config import ComputeConfig, GRTConfig
from model.core import RecurrentCore
from model.initialization import keyed_normal, replicated
from model.layers import Block, Norm, rotary_embedding
from model.loss import linear_cross_entropy
from model.parallel import enter_tensor_parallel, own_tokens


class PositionEmbedding(nn.Module):
    """Learned absolute positions, replicated."""

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        fill = keyed_normal(seed, f"{name}.weight", config.init_std)
        self.weight = replicated((config.max_positions, config.hidden_size), dtype, fill)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [...] -> [..., D]."""
        if torch.are_deterministic_algorithms_enabled():  # as in Megatron's: F.embedding's backward pass is not, says megatron-core 0.16.1
            return self.weight[positions]
        return F.embedding(positions, self.weight)


class Embedding(nn.Module):
    """Token embedding, split over the vocabulary, plus learned positions unless the model is rotary."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        self.parallel = parallel
        self.tokens = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            init_method=keyed_normal(seed, f"{name}.tokens.weight", config.init_std),
            config=parallel,
            reduce_scatter_embeddings=parallel.sequence_parallel,
        )
        learned = config.position == "learned"
        self.positions = PositionEmbedding(config, f"{name}.positions", parallel.params_dtype, seed) if learned else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """int64 [B, S] twice -> [T, B, D]."""
        embedded = self.tokens(tokens_BS)
        if not self.parallel.sequence_parallel:  # else Megatron's embedding has done so
            embedded = embedded.transpose(0, 1).contiguous()
        if self.positions is not None:
            embedded = embedded + self.positions(own_tokens(positions_BS.t(), self.parallel))
        return embedded


class Head(nn.Module):
    """Tied head and loss.

    It reads the embedding's weight in its own forward, where ZeRO-3 sees that it does.
    """

    def __init__(self, config: GRTConfig, parallel: ModelParallelConfig, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self._tied = (embedding,)  # in a tuple: not a child, whose parameters would be listed and gathered twice

    def forward(self, hidden: Tensor, targets_BS: Tensor | None, weights_BS: Tensor | None) -> Tensor:
        """[T, B, D] -> loss, fp32 scalar, or without targets logits [S, B, V]; as in `GRT.forward`."""
        (embedding,) = self._tied
        hidden = enter_tensor_parallel(hidden, self.parallel)
        if targets_BS is None:
            logits_SBV = F.linear(hidden, embedding.weight)
            padding = self.config.vocab_size - embedding.vocab_start_index  # first padded column of this rank
            logits_SBV[..., max(padding, 0) :] = float("-inf")
            return logits_SBV
        if weights_BS is None:
            weights_BS = torch.full_like(targets_BS, 1 / targets_BS.numel(), dtype=torch.float32)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            embedding.weight,
            targets_BS.t().flatten(),
            weights_BS.t().flatten(),
            first_column=embedding.vocab_start_index,
            vocab_size=self.config.vocab_size,
            group=embedding.tp_group,
        )


class GRT(nn.Module):
    """One set of weights for every depth.

    Args:
        config: sizes.
        parallel: Megatron's layer settings (`model.parallel.layer_config`); its groups must be initialised.
        seed: of the initial weights and of the noise.
        compute: how the arithmetic is run; the default is a model without checkpointing or compilation.
    """

    def __init__(self, config: GRTConfig, parallel: ModelParallelConfig, seed: int, compute: ComputeConfig | None = None) -> None:
        super().__init__()
        config.validate_tensor_parallel(parallel.tensor_model_parallel_size)
        self.config = config
        self.seed = seed
        self.parallel = parallel
        compute = compute or ComputeConfig()

        def blocks(name: str, count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(config, f"{name}.{i}", parallel, seed, compute.checkpoints_blocks) for i in range(count))

        self.embedding = Embedding(config, "embedding", parallel, seed)
        self.prelude = blocks("prelude", config.prelude_blocks)
        self.core = RecurrentCore(config, "core", parallel, seed, compute) if config.core_blocks else None
        self.coda = blocks("coda", config.coda_blocks)
        self.final_norm = Norm(config.hidden_size, config, parallel.params_dtype)
        self.head = Head(config, parallel, self.embedding.tokens)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        depth: int,
        sequences_B: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        weights_BS: Tensor | None = None,
        measure: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The loss, or the logits.

        Args:
            tokens_BS: int64 [B, S].
            targets_BS: int64 [B, S]; None returns logits.
            depth: recurrences, any number from 0; ignored by a dense model.
            sequences_B: int64 [B], number of each sequence in the stream, which keys the noise; None means noise-free (evaluation).
            cu_seqlens: int32 [documents + 1], where each document begins among the B * S tokens laid end to end, then B * S, repeated at
                will: attention stays inside documents, and positions count from their beginning. Each sequence begins one. None means
                one document a sequence.
            weights_BS: fp32 [B, S], weight of each token's loss in the sum; None means the mean of all tokens.
            measure: whether to take the core's statistics.

        Returns:
            the loss, an fp32 scalar, or logits [S, B, V] with -inf in the padded columns; and the core's statistics [depth, 2].

        Raises:
            ValueError: the sequence is longer than `max_positions`.
        """
        length = tokens_BS.shape[1]
        if length > self.config.max_positions:
            raise ValueError(f"The sequence has {length} tokens; model.max_positions allows {self.config.max_positions}.")
        if cu_seqlens is None:
            positions_BS = torch.arange(length, device=tokens_BS.device).expand_as(tokens_BS)
        else:
            positions_BS = document_positions(cu_seqlens, tokens_BS)
        hidden = self.embedding(tokens_BS, positions_BS)
        rotary = None
        if self.config.position == "rope":
            rotary = rotary_embedding(positions_BS, self.config.head_size, self.config.rope_theta, hidden.dtype)
        documents = None if cu_seqlens is None else attention_documents(cu_seqlens, tokens_BS.shape, hidden.dtype, self.config.head_size)

        for block in self.prelude:
            hidden = block(hidden, documents, rotary)
        core_statistics = hidden.new_zeros(0, 2)
        if self.core is not None:
            positions = None if sequences_B is None else own_tokens(noise_positions(sequences_B, length), self.parallel)
            hidden, core_statistics = self.core(hidden, documents, rotary, depth, positions, measure)
        for block in self.coda:
            hidden = block(hidden, documents, rotary)
        return self.head(self.final_norm(hidden), targets_BS, weights_BS), core_statistics


def noise_positions(sequences_B: Tensor, length: int) -> Tensor:
    """int64 [S, B]: global position of each token, sequence number x length + offset."""
    return sequences_B * length + torch.arange(length, device=sequences_B.device)[:, None]
