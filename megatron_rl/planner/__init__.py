"""`megatron-rl plan`: what a run would hold, move and wait for on a cluster, told from the model's config.json alone. No torch.

hardware    GPUs and links, by their data sheets
candidate   one way of placing a run on a cluster, and what it asks of the configuration
memory      bytes of weights, masters, gradients, moments, KV cache: exact, from the shards of `parallel`
activations bytes of what a forward pass keeps for the backward pass
phases      memory of each kind of GPU in each phase of a step
timing      seconds by rooflines, the pipeline's bubble, the sync's bytes by link: estimates
alignment   every kind of tensor in both layouts, and whether its FP8 blocks are whole
search      candidates that fit, the fastest first
screen, sbatch, command    what the user sees
"""
