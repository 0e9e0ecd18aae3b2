"""pretend: a device of that name that computes on the CPU, to try critkl off the CPU without one.

Tensors on it refuse what a GPU refuses: to meet tensors of the CPU in one operation (numbers and
indices excepted). `waits` counts what makes a program wait for a GPU: values that Python reads, and
shapes that depend on values.
"""
import contextlib
import math
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
DEVICE = torch.device("pretend:0")
aten = torch.ops.aten
waits = Counter()


class Pretend(torch.Tensor):
    """A tensor on the device; `held` is the one on the CPU that computes for it."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE, requires_grad=held.requires_grad)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, spec):
        return format(self.item(), spec)

    def __repr__(self):
        return f"Pretend({self.held!r})"


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Unwrap, compute on the CPU, wrap."""
    tensors = []

    def unwrap(tensor):
        tensors.append(tensor)
        return tensor.held if isinstance(tensor, Pretend) else tensor

    held_args = for_each(args, unwrap)
    held_kwargs = {name: for_each(x, unwrap) for name, x in kwargs.items()}
    wrappers = [x for x in tensors if isinstance(x, Pretend)]
    device = kwargs.get("device")
    to_device = bool(wrappers) if device is None else torch.device(device).type == "pretend"
    if wrappers:
        count_waits(func, args, to_device)
        refuse_mixed(func, args, tensors)
    if device is not None:
        held_kwargs["device"] = "cpu"
    result = func(*held_args, **held_kwargs)
    if not to_device:
        return result
    same = {id(x.held): x for x in wrappers}                         # an operation in place
    return for_each(result, lambda x: same[id(x)] if id(x) in same else Pretend(x))

def for_each(value, function):
    """The value with function(tensor) for each tensor in it; in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([for_each(x, function) for x in value])
    return value

def count_waits(func, args, to_device):
    name = func.overloadpacket.__name__
    bool_index = func is aten.index.Tensor and any(
        i is not None and i.dtype == torch.bool for i in args[1])
    if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal") or bool_index:
        waits[name] += 1
    elif name == "_to_copy" and not to_device:
        waits["to the CPU"] += 1

def refuse_mixed(func, args, tensors):
    if func in (aten._to_copy.default, aten.copy_.default):
        return
    if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        tensors = [args[0], *args[2:3]]
    strangers = [x for x in tensors if isinstance(x, torch.Tensor) and not isinstance(x, Pretend)
                 and x.dim() > 0]
    if strangers:
        raise RuntimeError(f"{func}: tensors of the CPU and of the device in one operation")

@contextlib.contextmanager
def use():
    """Inside, device="pretend" works. Four functions of torch that would need C++ for a new device
    go by way of the CPU; attention is the kernel of the CPU, so that numbers can be compared."""
    plain_tensor, plain_save, plain_load = torch.tensor, torch.save, torch.load

    def tensor(data, device=None, **kwargs):
        made = plain_tensor(data, **kwargs)
        return made if device is None else made.to(device)

    def attention(q, k, v, attn_mask=None, is_causal=False):
        if attn_mask is not None:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]

    def save(content, file):
        plain_save(move(content, "cpu"), file)

    def load(file, map_location, weights_only):
        return move(plain_load(file, "cpu", weights_only=weights_only), map_location)

    with mock.patch("torch.tensor", tensor), mock.patch("torch.save", save), \
            mock.patch("torch.load", load), Device(), \
            mock.patch("torch.nn.functional.scaled_dot_product_attention", attention):
        yield

def move(content, device):
    """The tensors in nested dicts and lists, on another device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, content)
