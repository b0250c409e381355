"""The loss of a language model's head in slices of tokens: of the logits [T, V] only a slice exists at a time.

    logits = x W^T      loss = mean over t of (logsumexp(logits_t) - logits_t[target_t])      d loss / d logits = (softmax - onehot) / T

Since the loss is the last thing of a forward, a slice's gradient is made right after its logits, and both are dropped then: what is kept
for the backward is as large as x and W. Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peer.training import compiled
from protocol.planning.memory import GPU_LOGITS, LOGITS

_SLICE = {"cuda": GPU_LOGITS}
"""Logits at a time, by kind of device, if not LOGITS."""


def mean(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy [] fp32, nats per token. Products are in the number format of autocast where that is on."""
    loss: Tensor = _Slices.apply(x_TD, weight_VD, targets_T, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


def _slice(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """This slice's sum of losses, and its gradient with respect to the logits, in their number format."""
    log_TV, targets_T1 = functional.log_softmax(logits_TV.float(), 1), targets_T[:, None]
    loss = -log_TV.gather(1, targets_T1).sum()
    if logits_TV.is_cuda:  # the compiler makes one pass of this
        is_target_TV = torch.arange(log_TV.shape[1], device=log_TV.device) == targets_T1
        gradient_TV = log_TV.exp() - is_target_TV.float()
    else:  # here each operation is a pass, and in place it needs no memory
        gradient_TV = log_TV.exp_().scatter_add_(1, targets_T1, log_TV.new_full(targets_T1.shape, -1.0))
    return loss, gradient_TV.to(logits_TV.dtype)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, trained: bool) -> Tensor:
        kind, tokens = x_TD.device.type, len(x_TD)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TD.dtype
        x, weight = x_TD.to(dtype), weight_VD.to(dtype)
        step = max(1, _SLICE.get(kind, LOGITS) // len(weight))
        grad_x = torch.empty_like(x) if trained else None
        grad_weight = torch.zeros_like(weight_VD) if trained else None
        loss = torch.zeros((), device=x.device)
        part_of = compiled.where_it_pays(_slice, x.device)
        with torch.autocast(kind, enabled=False):
            for at in range(0, tokens, step):
                part, targets = x[at : at + step], targets_T[at : at + step]
                lost, gradient = part_of(part @ weight.T, targets)
                loss += lost
                if grad_x is not None and grad_weight is not None:
                    torch.mm(gradient, weight, out=grad_x[at : at + step])
                    if dtype == grad_weight.dtype:
                        torch.addmm(grad_weight, gradient.T, part, out=grad_weight)
                    else:  # sums of slices are fp32
                        grad_weight += gradient.T @ part
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype, ctx.tokens = x_TD.dtype, tokens
        return loss / tokens

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        grad_x, grad_weight = ctx.saved_tensors
        scale = gradient / ctx.tokens
        return grad_x.to(ctx.dtype) * scale, grad_weight.mul_(scale), None, None
