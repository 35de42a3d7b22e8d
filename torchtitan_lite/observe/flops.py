"""How many FLOPs a token costs: what MFU, the share of a device's peak, is reckoned from.

A matrix product with P parameters costs a token 2P FLOPs forward (a multiplication and an
addition each) and twice that backward (one product for the input's gradient, one for the
weight's): 6P. Attention multiplies no parameters, but each token's query meets all seq_len keys
and values: 2 products forward, so 12 * seq_len * heads * head_dim a layer with the backward.
This is the count of PaLM, appendix B (https://arxiv.org/abs/2204.02311).

It counts the work that the model asks for, not the work that is done: activations that are
recomputed count once, rows that pad the vocabulary count nothing. That makes MFU comparable
between runs, and lower for whoever recomputes.

Proven in tests/observe/test_flops.py against torch's FlopCounterMode, to the last FLOP.
"""

from __future__ import annotations

from torchtitan_lite.models.attention import window_of_layer
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import matmul_parameters


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of `seq_len` tokens.

    Matrix parameters are the projections of each layer and the output head (also where it is tied
    to the embedding); the embedding itself is a lookup and costs none. Norms, activations, the
    softmax and a state-space scan are left out, as everywhere.

    The causal mask gets no discount, although a kernel may skip the half that is masked: PaLM's
    appendix B counts the full square and so do the MFU numbers that others publish. A sliding
    window shorter than the sequence does.
    """
    layers = range(model.num_hidden_layers)
    matrices = len(layers) * matmul_parameters(model) + model.hidden_size * model.vocab_size
    if model.layer_type != "attention":
        return float(6 * matrices)
    keys = sum(min(seq_len, window_of_layer(model, index) or seq_len) for index in layers)
    return float(6 * matrices + 12 * model.num_attention_heads * model.head_dim * keys)
