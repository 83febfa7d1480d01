"""Kinds of attention: one class per kind, whose objects describe the attention of a layer. Everything that depends on the kind and needs no
torch is a method of the class. What needs torch or SGLang are tables by class, in the packages that import them:

    megatron_rl.cost.attention          operators of a layer, for the estimates
    megatron_rl.mcore.attention_kinds   Megatron's options

To add a kind, add its file here and a row to each table.
"""

from parallel.attention.base import AttentionKind
from parallel.attention.gated_delta_net import GatedDeltaNet
from parallel.attention.latent import Indexer, LatentAttention
from parallel.attention.sinks import SinkAttention
from parallel.attention.softmax import SoftmaxAttention

__all__ = ["AttentionKind", "GatedDeltaNet", "Indexer", "LatentAttention", "SinkAttention", "SoftmaxAttention"]
