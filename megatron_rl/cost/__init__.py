"""What a model costs on a GPU: bytes of weights, and FLOPs, bytes moved and activations of each operator. Shared by `plan` and
`rehearse`."""
