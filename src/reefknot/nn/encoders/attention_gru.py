"""A translation model with GRUs and attention (session 2 of the DL4MT tutorial; Press & Wolf 2017).

Start reading at `AttentionGRU`. Two GRUs read the source, one from each end. Their concatenated states are the
annotations a_i of the source tokens i. The first state of the target is s = tanh(W mean_i a_i + b). A target step is
two GRU steps with attention to the source in between (Bahdanau et al. 2015):

    s' = GRU(y, s)                                               y is the vector of the previous word
    e_i = v . tanh(K a_i + b + Q s') + b_e                       the attention scores
    c = sum_i softmax(e)_i a_i                                   the context from the source
    s = GRU(c, s')
    output = tanh(W_s s + b_s + W_y y + b_y + W_c c + b_c)

Shapes: B streams (rows of a batch), S source tokens, T target steps, D dimensions of the vectors, H units, G = 3H gates
(reset, update, candidate), A = 2H dimensions of an annotation and of its key, R dimensions of the output, N = B x S
source positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.nn.bounds import Dim, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State, to_state_dtype
from reefknot.nn.encoders.stacked import GRU, get_weights
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights

INIT_STD = 0.01
"""Standard deviation of the initial matrices that are not orthogonal."""


class AttentionGRU(SourceEncoder):
    """Bidirectional GRU over the source, conditional GRU with attention over the target (DL4MT; Press & Wolf 2017).

    Details that differ from other programs:

    - The reset gate acts on U_n h (see `gru_step`), as in cuDNN, so torch's own layers can read the source.
    - A gate has one bias. The bias of the candidate is added to W_n x, except in the second GRU of a step, where it is
      added to U_n h before the reset gate acts.
    - Two of the three output biases and the bias of the attention scores, b_e, are redundant. They are included,
      because the tutorial's program has them and counts them as parameters.
    - In the tutorial the first y is zero. Here it is the vector of the token before the first word.

    Args:
        source_dim: Dimension of the source vectors.
        input_dim: Dimension of the target vectors.
        units: Number of units of each of the two source GRUs and of the target GRU.
        readout: Dimension of the output. The default is the dimension of the target vectors.
        dropout: Dropout rate of the source vectors, the target vectors and the output.
    """

    def __init__(
        self,
        source_dim: int,
        input_dim: int,
        units: Dim = 1000,
        readout: Dim | None = None,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        self.source_dim = source_dim
        self.input_dim = input_dim
        self.dim = input_dim if readout is None else readout
        check_sizes("AttentionGRU", source_dim=source_dim, input_dim=input_dim, units=units, readout=self.dim)
        check_rates("AttentionGRU", dropout=dropout)
        self.dropout = dropout

        # The two GRUs over the source, and the map from the mean annotation to the first state of the target.
        self.rightward = GRU(source_dim, units, layers=1)
        self.leftward = GRU(source_dim, units, layers=1)
        self.start = nn.Linear(2 * units, units)

        # The first GRU of a target step reads the previous word.
        self.word = nn.Linear(input_dim, 3 * units)
        self.word_recurrent = nn.Linear(units, 3 * units, bias=False)

        # Attention to the source.
        self.keys = nn.Linear(2 * units, 2 * units)
        self.query = nn.Linear(units, 2 * units, bias=False)
        self.score = nn.Linear(2 * units, 1)

        # The second GRU of a target step reads the context from the source.
        self.context = nn.Linear(2 * units, 3 * units, bias=False)
        self.context_recurrent = nn.Linear(units, 3 * units)

        # The output is computed from the state, the previous word and the context.
        self.read_state = nn.Linear(units, self.dim)
        self.read_word = nn.Linear(input_dim, self.dim)
        self.read_context = nn.Linear(2 * units, self.dim)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Initialise as the tutorial's program does: recurrent matrices and keys are orthogonal, biases are zero."""
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=INIT_STD)
        recurrent_weights = [self.word_recurrent.weight, self.context_recurrent.weight]
        for source_gru in (self.rightward, self.leftward):
            _, recurrent_weight, _, _ = get_weights(source_gru.layers[0])
            recurrent_weights.append(recurrent_weight)
        for weight_GH in recurrent_weights:
            for gate_weight_HH in weight_GH.detach().chunk(3):
                nn.init.orthogonal_(gate_weight_HH)
        nn.init.orthogonal_(self.keys.weight)

    def encode_source(self, source_BSD: Tensor, mask_BS: Tensor) -> State:
        """Return the annotations, their attention keys, the padding mask, and the state before the first target step.

        Args:
            source_BSD: Vectors of the source tokens, with shape (B, S, source_dim).
            mask_BS: Mask with shape (B, S): True for tokens and False for padding, which must be on the right. The
                vectors of padding may have any finite value. Every source has at least one token.
        """
        source_BSD = F.dropout(source_BSD, self.dropout, self.training)
        initial_state = self.rightward.initial_state(len(source_BSD), source_BSD.device)

        # Read the source from both ends. In both directions the padding comes last, so no state that is used depends
        # on the padding.
        rightward_BSH = self.rightward(source_BSD, initial_state).output
        reversed_order_N = compute_reversed_order(mask_BS)
        reversed_BSH = self.leftward(reorder(source_BSD, reversed_order_N), initial_state).output
        leftward_BSH = reorder(reversed_BSH, reversed_order_N)
        annotations_BSA = torch.cat([rightward_BSH, leftward_BSH], dim=-1)

        # The first state of the target is computed from the mean of the annotations, without padding.
        sum_BA = (to_state_dtype(annotations_BSA) * mask_BS[..., None]).sum(1)
        mean_BA = sum_BA / mask_BS.sum(1, keepdim=True)
        state_BH = torch.tanh(self.start(mean_BA.to(annotations_BSA.dtype)))

        return {
            "h": to_state_dtype(state_BH)[None],
            "annotations": annotations_BSA[None],
            "keys": self.keys(annotations_BSA)[None],
            "source_mask": mask_BS[None],
        }

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of target steps that follow `state`, and the state after the steps.

        Args:
            inputs_BTD: Vectors of the target tokens, with shape (B, T, input_dim).
            state: The state that `encode_source` or an earlier call returned.
        """
        inputs_BTD = F.dropout(inputs_BTD, self.dropout, self.training)
        states_BTH, contexts_BTA, _ = self._run_steps(inputs_BTD, state)
        raw_BTR = torch.tanh(self.read_state(states_BTH) + self.read_word(inputs_BTD) + self.read_context(contexts_BTA))
        output_BTR = F.dropout(raw_BTR, self.dropout, self.training)
        last_state_BH = to_state_dtype(states_BTH[:, -1])
        return Encoded(output_BTR, raw_BTR, state | {"h": last_state_BH[None]})

    def attention(self, inputs_BTD: Tensor, state: State) -> Tensor:
        _, _, attention_BTS = self._run_steps(inputs_BTD, state)
        return attention_BTS

    def translation_flops(self, source_lengths_B: Tensor, target_lengths_B: Tensor) -> int:
        source_layers = (self.rightward, self.leftward, self.keys)
        weights_per_source_token = sum(count_matrix_weights(layer) for layer in source_layers)
        weights_per_pair = count_matrix_weights(self.start)
        weights_per_target_token = count_matrix_weights(self) - weights_per_source_token - weights_per_pair
        products = (
            int(source_lengths_B.sum()) * weights_per_source_token
            + len(source_lengths_B) * weights_per_pair
            + int(target_lengths_B.sum()) * weights_per_target_token
        )
        # The weighted sum of the annotations costs as much as the attention scores, hence the factor 2.
        attention_products = 2 * self.keys.out_features * int((source_lengths_B * target_lengths_B).sum())
        return FLOPS_PER_WEIGHT * (products + attention_products)

    def _run_steps(self, inputs_BTD: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Run the target steps that follow `state`.

        Return the state (B, T, H), the context from the source (B, T, A) and the attention weights (B, T, S) of every
        step.
        """
        annotations_BSA = state["annotations"][0]
        keys_BSA = state["keys"][0]
        is_padding_BS = ~state["source_mask"][0]
        # Convert the state to the type of the parameters, so that it stays in float32 under autocast.
        state_BH = state["h"][0].to(self.start.weight.dtype)

        states: list[Tensor] = []
        contexts: list[Tensor] = []
        attentions: list[Tensor] = []
        for word_BG in self.word(inputs_BTD).unbind(1):
            state_BH = gru_step(word_BG, self.word_recurrent(state_BH), state_BH)
            scores_BS = self.score(torch.tanh(keys_BSA + self.query(state_BH)[:, None]))[..., 0]
            attention_BS = scores_BS.masked_fill(is_padding_BS, -torch.inf).softmax(-1)
            context_BA = (attention_BS[:, None] @ annotations_BSA)[:, 0]
            state_BH = gru_step(self.context(context_BA), self.context_recurrent(state_BH), state_BH)
            states.append(state_BH)
            contexts.append(context_BA)
            attentions.append(attention_BS)
        return torch.stack(states, dim=1), torch.stack(contexts, dim=1), torch.stack(attentions, dim=1)


def gru_step(inputs_BG: Tensor, recurrent_BG: Tensor, state_BH: Tensor) -> Tensor:
    """Return the state of a GRU after one step. For the input x and the state h before the step:

        r, z = sigmoid(W x + U h + b)                 reset gate and update gate
        n = tanh(W_n x + r (U_n h))                   candidate
        next state = (1 - z) n + z h

    Args:
        inputs_BG: Contribution of the input to r, z and n, including its biases.
        recurrent_BG: Contribution of the state to r, z and n, including its biases.
        state_BH: State before the step.
    """
    units = state_BH.shape[-1]
    # Split rather than slice: the backward pass of every slice would allocate a full-size tensor of zeros.
    input_gates, input_candidate = inputs_BG.split_with_sizes([2 * units, units], dim=-1)
    recurrent_gates, recurrent_candidate = recurrent_BG.split_with_sizes([2 * units, units], dim=-1)
    reset_BH, update_BH = torch.sigmoid(input_gates + recurrent_gates).chunk(2, dim=-1)
    candidate_BH = torch.tanh(input_candidate + reset_BH * recurrent_candidate)
    return candidate_BH + update_BH * (state_BH - candidate_BH)


def compute_reversed_order(mask_BS: Tensor) -> Tensor:
    """Return the order that reverses the tokens of each row and does not move its padding, with shape (N,).

    Positions are counted over all rows. Reordering twice restores the original order. For rows of 3 and 2 tokens:

        mask [[1, 1, 1], [1, 1, 0]] -> 2, 1, 0, 4, 3, 5
    """
    streams, length = mask_BS.shape
    positions_S = torch.arange(length, device=mask_BS.device)
    last_positions_B1 = mask_BS.sum(1, keepdim=True) - 1
    order_BS = torch.where(mask_BS, last_positions_B1 - positions_S, positions_S)
    row_starts_B1 = length * torch.arange(streams, device=mask_BS.device)[:, None]
    return (row_starts_B1 + order_BS).flatten()


def reorder(vectors_BSD: Tensor, order_N: Tensor) -> Tensor:
    """Return the vectors in another order of positions.

    Each position is taken once, so the gradient is deterministic.
    """
    vectors_ND = vectors_BSD.flatten(0, 1)
    return vectors_ND.index_select(0, order_N).view_as(vectors_BSD)
