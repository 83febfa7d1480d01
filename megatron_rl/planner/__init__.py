"""`megatron-rl plan`: what a run would hold, move and wait for on a cluster, from the model's config.json alone. No torch.

hardware           GPUs and links, from their data sheets
candidate          a placement of a run on a cluster, and the configuration that it needs
memory             bytes of weights, masters, gradients, moments, KV cache: exact, from the shards of `parallel`
activation_memory  bytes that a forward pass keeps for the backward pass
memory_by_phase    memory of each kind of GPU in each phase of a step
roofline           seconds of a step, and the pipeline's bubble: estimates
sync_traffic       bytes of a sync by link
block_alignment    every kind of parameter in both layouts, and whether its FP8 blocks are whole
search             candidates that fit, the fastest first
plan, tables, sbatch    what the user sees
"""
