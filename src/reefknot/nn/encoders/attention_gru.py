"""The attention GRU of the DL4MT tutorial (its session 2), the translator of Press & Wolf (2017).

A source is read by two GRUs, one from either end, whose states side by side are its annotations a_s. The target's first
state is tanh(W mean_s a_s + b), over the words that are there. A target step is two steps of a GRU, with a look at the
source in between (a "conditional GRU"; the attention is that of Bahdanau et al. 2015):

    s' = GRU(y, s)                              y: the vector of the word before
    e_s = v . tanh(K a_s + b + Q s') + b_e      c = sum_s softmax(e)_s a_s
    s = GRU(c, s')                              output: tanh(W_h s + b_h + W_y y + b_y + W_c c + b_c)

    GRU(x, h):  r, z = sigmoid(W x + U h + b)   n = tanh(W_n x + r (U_n h))   h = (1 - z) n + z h

The reset gate acts on U_n h, as in cuDNN, so the source is read by torch's own layers. A gate has one bias; that of n
stands beside W_n x, but in the second GRU of a step beside U_n h, inside the reset. Two of the three biases of the
read-out and that of the scores, b_e, change nothing that the model can say; the tutorial's program has them, so they
are here and counted. There the first y is zero; here it is the vector of whatever word stands before the first.

Shapes: B streams, S source positions, T target steps, D width of the vectors, H units, G = 3H gates r, z, n, A = 2H
width of an annotation and of what scores it, R width of the read-out.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.lab.config.settings import Dim, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State, at_rest, check_sizes
from reefknot.nn.encoders.stacked import GRU, weights_of

DEVIATION = 0.01
"""Of every matrix that does not start orthogonal."""


class AttentionGRU(SourceEncoder):
    """Bidirectional GRU over the source, conditional GRU with attention over the target (DL4MT; Press & Wolf 2017)."""

    def __init__(
        self,
        source_dim: int,
        input_dim: int,
        units: Annotated[Dim, Field(description="units of the GRU from either end and of the target's")] = 1000,
        readout: Annotated[
            Dim | None, Field(description="width of what the output end reads; left out, that of the target's vectors")
        ] = None,
        dropout: Annotated[
            Probability, Field(description="drop rate on the vectors of both sides and on the read-out")
        ] = 0.0,
    ) -> None:
        super().__init__()
        self.source_dim = source_dim
        self.input_dim = input_dim
        self.dim = input_dim if readout is None else readout
        check_sizes("AttentionGRU", source_dim=source_dim, input_dim=input_dim, units=units, readout=self.dim)
        check_rates("AttentionGRU", dropout=dropout)
        self.dropout = dropout
        self.rightward = GRU(source_dim, units, layers=1)
        self.leftward = GRU(source_dim, units, layers=1)
        self.start = nn.Linear(2 * units, units)
        self.word = nn.Linear(input_dim, 3 * units)
        self.word_recurrent = nn.Linear(units, 3 * units, bias=False)
        self.keys = nn.Linear(2 * units, 2 * units)
        self.query = nn.Linear(units, 2 * units, bias=False)
        self.score = nn.Linear(2 * units, 1)
        self.context = nn.Linear(2 * units, 3 * units, bias=False)
        self.context_recurrent = nn.Linear(units, 3 * units)
        self.read_state = nn.Linear(units, self.dim)
        self.read_word = nn.Linear(input_dim, self.dim)
        self.read_context = nn.Linear(2 * units, self.dim)
        self._draw()

    def _draw(self) -> None:
        """Start as the tutorial's program does: recurrent matrices, and that of the keys, orthogonal; biases zero."""
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=DEVIATION)
        recurrent = [self.word_recurrent.weight, self.context_recurrent.weight]
        recurrent += [weights_of(each.layers[0])[1] for each in (self.rightward, self.leftward)]
        for weight_GH in recurrent:
            for weight_HH in weight_GH.detach().chunk(3):
                nn.init.orthogonal_(weight_HH)
        nn.init.orthogonal_(self.keys.weight)

    def read(self, source_BSD: Tensor, there_BS: Tensor) -> State:
        """The annotations, their share of the scores, where they are, and the state before the first target step."""
        source_BSD = F.dropout(source_BSD, self.dropout, self.training)
        turned_N = turned(there_BS)
        start = self.rightward.initial_state(len(source_BSD), source_BSD.device)
        # Either way the padding comes last, where nothing that is looked at can follow from it.
        rightward_BSH = self.rightward(source_BSD, start).output
        leftward_BSH = self.leftward(reorder(source_BSD, turned_N), start).output
        a_BSA = torch.cat([rightward_BSH, reorder(leftward_BSH, turned_N)], dim=-1)
        mean_BA = (at_rest(a_BSA) * there_BS[..., None]).sum(1) / there_BS.sum(1, keepdim=True)
        h_BH = torch.tanh(self.start(mean_BA.to(a_BSA.dtype)))
        return {
            "h": at_rest(h_BH)[None],
            "annotations": a_BSA[None],
            "keys": self.keys(a_BSA)[None],
            "there": there_BS[None],
        }

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        x_BTD = F.dropout(x_BTD, self.dropout, self.training)
        s_BTH, c_BTA, _ = self._walk(x_BTD, state)
        raw_BTR = torch.tanh(self.read_state(s_BTH) + self.read_word(x_BTD) + self.read_context(c_BTA))
        output_BTR = F.dropout(raw_BTR, self.dropout, self.training)
        return Encoded(output_BTR, raw_BTR, state | {"h": at_rest(s_BTH[:, -1])[None]})

    def attention(self, x_BTD: Tensor, state: State) -> Tensor:
        return self._walk(x_BTD, state)[2]

    def _walk(self, x_BTD: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Of every step the state s_BTH, what it saw of the source, c_BTA, and the weights of that, w_BTS."""
        a_BSA, keys_BSA, padding_BS = state["annotations"][0], state["keys"][0], ~state["there"][0]
        # In the type of the parameters: under autocast the state adds up in float32.
        s_BH = state["h"][0].to(self.start.weight.dtype)
        states, contexts, weights = [], [], []
        for word_BG in self.word(x_BTD).unbind(1):
            s_BH = gru_step(word_BG, self.word_recurrent(s_BH), s_BH)
            e_BS = self.score(torch.tanh(keys_BSA + self.query(s_BH)[:, None]))[..., 0]
            w_BS = e_BS.masked_fill(padding_BS, -torch.inf).softmax(-1)
            c_BA = (w_BS[:, None] @ a_BSA)[:, 0]
            s_BH = gru_step(self.context(c_BA), self.context_recurrent(s_BH), s_BH)
            states.append(s_BH)
            contexts.append(c_BA)
            weights.append(w_BS)
        return torch.stack(states, dim=1), torch.stack(contexts, dim=1), torch.stack(weights, dim=1)


def gru_step(x_BG: Tensor, u_BG: Tensor, h_BH: Tensor) -> Tensor:
    """The state after h, from the shares of the gates that the input, x, and that state itself, u, have, biases among
    them."""
    widths = [2 * h_BH.shape[-1], h_BH.shape[-1]]
    # Split, not sliced: the gradient of each slice alone would be laid into zeros of their common size.
    (x_rz, x_n), (u_rz, u_n) = (each.split_with_sizes(widths, dim=-1) for each in (x_BG, u_BG))
    r_BH, z_BH = torch.sigmoid(x_rz + u_rz).chunk(2, dim=-1)
    n_BH = torch.tanh(x_n + r_BH * u_n)
    return n_BH + z_BH * (h_BH - n_BH)


def turned(there_BS: Tensor) -> Tensor:
    """For every position, counted over rows, the one that takes its place where the words of each row are turned round
    and its padding stays, (B x S,). Turning twice gives back the rows."""
    streams, positions = there_BS.shape
    at_S = torch.arange(positions, device=there_BS.device)
    last_B1 = there_BS.sum(1, keepdim=True) - 1
    turned_BS = torch.where(there_BS, last_B1 - at_S, at_S)
    rows_B1 = torch.arange(streams, device=there_BS.device)[:, None]
    return (rows_B1 * positions + turned_BS).flatten()


def reorder(x_BSD: Tensor, order_N: Tensor) -> Tensor:
    """Positions in another order. Each is taken once, so that the gradient adds nothing up, and in no order."""
    return x_BSD.flatten(0, 1).index_select(0, order_N).view_as(x_BSD)
