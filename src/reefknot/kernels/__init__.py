"""Functions on tensors that need more than plain autograd to be fast: losses, recurrences and training loops.

Start reading here:

    linear_cross_entropy    the loss of a linear classifier without storing all its scores
    topk, soft_target       the best classes, and softmax-weighted means, computed in the same way
    recurrence              LSTM layers with a dropout mask on their state
    skip_gram               training of word vectors, in place
    capture                 CUDA graphs
    choice                  which implementation runs, and how much memory it may use

The other modules implement these. Those whose names start with `triton_` and `numba_` are imported when they are used.
"""
