"""The Gated Recurrent Transformer: embedding, prelude, recurrent core, coda, tied head and loss in one module.

The loss is computed inside, so that ZeRO-3 sees every use of the tied embedding. A model without core blocks is a dense
transformer.

Shapes: S sequence, B batch, D hidden size, V padded vocabulary of this tensor-parallel rank.
"""

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import GRTConfig
from model.core import NoiseKey, RecurrentCore
from model.initialization import keyed_normal, replicated
from model.layers import Block, Norm, rotary_embedding


class PositionEmbedding(nn.Module):
    """Learned absolute positions, replicated."""

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        fill = keyed_normal(seed, f"{name}.weight", config.init_std)
        self.weight = replicated((config.max_positions, config.hidden_size), dtype, fill)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [...] -> [..., D]."""
        return F.embedding(positions, self.weight)


class Embedding(nn.Module):
    """Token embedding, split over the vocabulary, plus learned positions unless the model is rotary."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            init_method=keyed_normal(seed, f"{name}.tokens.weight", config.init_std),
            config=parallel,
        )
        learned = config.position == "learned"
        self.positions = PositionEmbedding(config, f"{name}.positions", parallel.params_dtype, seed) if learned else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """int64 [B, S] twice -> [S, B, D]."""
        embedded = self.tokens(tokens_BS)
        if self.positions is not None:
            embedded = embedded + self.positions(positions_BS)
        return embedded.transpose(0, 1).contiguous()


class GRT(nn.Module):
    """One set of weights for every depth.

    Args:
        config: sizes.
        parallel: Megatron's layer settings (`model.parallel.layer_config`); its groups must be initialised.
        seed: of the initial weights and of the noise.
    """

    def __init__(self, config: GRTConfig, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        config.validate_tensor_parallel(parallel.tensor_model_parallel_size)
        self.config = config
        self.seed = seed
        self.embedding = Embedding(config, "embedding", parallel, seed)
        self.prelude = nn.ModuleList(Block(config, f"prelude.{i}", parallel, seed) for i in range(config.prelude_blocks))
        self.core = RecurrentCore(config, "core", parallel, seed) if config.core_blocks else None
        self.coda = nn.ModuleList(Block(config, f"coda.{i}", parallel, seed) for i in range(config.coda_blocks))
        self.final_norm = Norm(config.hidden_size, config, parallel.params_dtype)
        self.head = ColumnParallelLinear(  # without a weight of its own: it is called with the embedding's
            config.hidden_size,
            config.padded_vocab_size,
            config=parallel,
            init_method=lambda _: None,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=True,
        )

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        depth: int,
        sequences_B: Tensor | None = None,
        positions_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        measure: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The loss of each token, or the logits.

        Args:
            tokens_BS: int64 [B, S].
            targets_BS: int64 [B, S]; None returns logits.
            depth: recurrences, any number from 0; ignored by a dense model.
            sequences_B: int64 [B], number of each sequence in the stream, which keys the noise; None means noise-free (evaluation).
            positions_BS: int64 [B, S], position of each token in its document; None counts from 0.
            segments_BS: int64 [B, S], document of each token: attention stays inside it; None means one document.
            measure: whether to take the core's statistics.

        Returns:
            fp32 losses [B, S], or logits [S, B, V] with -inf in the padded columns; and the core's statistics [depth, 2].

        Raises:
            ValueError: the sequence is longer than `max_positions`.
        """
        length = tokens_BS.shape[1]
        if length > self.config.max_positions:
            raise ValueError(f"The sequence has {length} tokens; model.max_positions allows {self.config.max_positions}.")
        if positions_BS is None:
            positions_BS = torch.arange(length, device=tokens_BS.device).expand_as(tokens_BS)
        hidden = self.embedding(tokens_BS, positions_BS)
        rotary = None
        if self.config.position == "rope":
            rotary = rotary_embedding(positions_BS, self.config.head_size, self.config.rope_theta, hidden.dtype)
        mask = None if segments_BS is None else segment_mask(segments_BS)

        for block in self.prelude:
            hidden = block(hidden, mask, rotary)
        core_statistics = hidden.new_zeros(0, 2)
        if self.core is not None:
            noise_key = None if sequences_B is None else NoiseKey(self.seed, noise_positions(sequences_B, length))
            hidden, core_statistics = self.core(hidden, mask, rotary, depth, noise_key, measure)
        for block in self.coda:
            hidden = block(hidden, mask, rotary)

        logits_SBV = self.logits(self.final_norm(hidden))
        if targets_BS is None:
            return logits_SBV, core_statistics
        losses_SB = vocab_parallel_cross_entropy(logits_SBV, targets_BS.t().contiguous())
        return losses_SB.t(), core_statistics

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, V] by the tied embedding, padded columns -inf."""
        logits_SBV, _ = self.head(hidden, weight=self.embedding.tokens.weight)
        padding = self.config.vocab_size - self.embedding.tokens.vocab_start_index  # first padded column of this rank
        logits_SBV[..., max(padding, 0) :] = float("-inf")
        return logits_SBV


def noise_positions(sequences_B: Tensor, length: int) -> Tensor:
    """int64 [S, B]: global position of each token, sequence number x length + offset."""
    return sequences_B * length + torch.arange(length, device=sequences_B.device)[:, None]


def segment_mask(segments_BS: Tensor) -> Tensor:
    """bool [B, 1, S, S]: query i may attend to key j <= i of the same segment."""
    same = segments_BS[:, :, None] == segments_BS[:, None, :]
    return same.tril()[:, None]
