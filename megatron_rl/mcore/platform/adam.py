"""Adam with the state layout of the FusedAdam of Transformer Engine and apex, for machines without them.

Megatron expects `step` in the parameter group, and only `exp_avg` and `exp_avg_sq` in the state. torch's AdamW keeps `step` in the state,
which Megatron cannot load back. With this class, the CPU takes the same path as the GPU.
"""

from typing import Any

import torch

_VALUES_IN_CACHE = 1 << 17  # weights updated at a time, so that gradients, moments and temporaries fit into a core's cache


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015), with decoupled weight decay (Loshchilov & Hutter 2019) if `adam_w_mode` is set."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        assert param.grad is not None
        tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
        parts = (tensor.view(-1).split(_VALUES_IN_CACHE) for tensor in tensors)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        correction1, correction2 = (1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in (beta1, beta2))
        for part, grad, mean, square in zip(*parts, strict=True):
            grad = grad.float()
            if decay and not self.adam_w_mode:
                grad = grad.add(part.float(), alpha=decay)
            mean.mul_(beta1).add_(grad, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = (mean / correction1).div_((square / correction2).sqrt_().add_(group["eps"]))
            if decay and self.adam_w_mode:
                update.add_(part.float(), alpha=decay)
            part.add_(update, alpha=-group["lr"])


def install() -> None:
    """Make Megatron use this Adam if neither Transformer Engine nor apex is installed."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.USING_APEX_OPTIMIZER = FusedAdam, True, True
