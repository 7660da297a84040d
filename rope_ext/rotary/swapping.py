"""Changes objects of other libraries, such as rotary buffers, and records how to undo the changes.

A patch appends a call to its ``Changes`` for each change. The calls are bound methods or partials
of module functions, so that a copied or pickled model undoes its own changes.

Where new values in rotary buffers are enough, the model's own code computes cosines and sines, so
caches, attention kernels and compilation work as before; ``hooks`` handles the other cases.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rope_ext.config.nested import configurations as nested
from rope_ext.rotary.sites import RotarySite, unwrap

Changes = list[Callable[[], Any]]
"""Calls that undo changes, in the order of the changes."""
ABSENT = ...
"""Stands for a missing attribute; pickling preserves its identity."""


_SEPARATED = "_rope_ext_configurations"
"""Attribute of a patched model: what its configurations were separated from."""


def undo(changes: Changes) -> None:
    """Undo every change, starting with the last."""
    while changes:
        changes.pop()()


def set_attribute(holder: Any, name: str, value: Any, changes: Changes) -> None:
    """Set an attribute until ``changes`` are undone."""
    keep_attributes(holder, (name,), changes)
    setattr(holder, name, value)


def keep_attributes(holder: Any, names: tuple[str, ...], changes: Changes) -> None:
    """Restore an object's attributes to their current values when ``changes`` are undone."""
    changes.append(functools.partial(restore, holder, _fields(holder, names)))


def restore(holder: Any, own: dict[str, Any]) -> None:
    """Set attributes of an object; remove those that are ``ABSENT``."""
    for name, value in own.items():
        if value is ABSENT:
            vars(holder).pop(name, None)
        else:
            vars(holder)[name] = value


@dataclass(eq=False)
class Separated:
    """A configuration, and the copy that a patch gave to a model in place of it.

    A later patch of a model around this one copies both again, and keeps them up to date here.
    """

    original: Any
    copied: Any
    before: dict[str, Any]  # fields of the copy as it was made


def separate_configurations(model: nn.Module, written: Iterable[str], changes: Changes) -> None:
    """Give all modules of ``model`` copies of their configurations until ``changes`` are undone.

    Other models may hold the same objects, and must not follow what a patch writes into them. Call
    it before any other change. Fields that the user sets meanwhile, such as ``use_cache``, are
    carried back; those that the patch has ``written`` are not.
    """
    own: dict[int, Any] = {}  # the memo of deepcopy: copies by the id of what they were made from
    made = []
    for original in [*_configurations(model)]:
        copied = copy.deepcopy(original, own)
        made.append(Separated(original, copied, _frozen(copied)))
    for holder in _holders(model):
        _replace(holder, [(one.original, one.copied) for one in made])
    vars(unwrap(model)).setdefault(_SEPARATED, []).extend(made)
    changes.append(functools.partial(_give_back, model, made, tuple(written)))


def originals(model: nn.Module) -> list[Any]:
    """Return the configurations that a patch of ``model`` itself has separated it from."""
    return [one.original for one in vars(unwrap(model)).get(_SEPARATED, ())]


@contextmanager
def written_back(
    model: nn.Module, parts: Iterable[nn.Module], written: Iterable[str]
) -> Iterator[None]:
    """Let the configuration of ``model`` contain what patches of ``parts`` have ``written``.

    A part, patched by itself, has a copy of what the configuration of the whole contains.
    """
    whole = {id(one) for one in nested(cast("Any", model).config)}
    before = []
    for part in parts:
        for one in vars(part).get(_SEPARATED, ()):
            if id(one.original) in whole:
                names = _stored(one.original, written)
                before.append((one.original, _fields(one.original, names)))
                restore(one.original, _fields(one.copied, names))
    try:
        yield
    finally:
        for original, own in reversed(before):
            restore(original, own)


def _give_back(model: nn.Module, made: list[Separated], written: tuple[str, ...]) -> None:
    """Return to the original configurations, with what the user has set in the copies."""
    place = vars(unwrap(model))
    place[_SEPARATED] = [one for one in place[_SEPARATED] if one not in made]
    if not place[_SEPARATED]:
        del place[_SEPARATED]
    back = [(one.copied, one.original) for one in made]
    for holder in _holders(model):
        _replace(holder, back)
    for one in made:
        now = vars(one.copied)
        ours = _stored(one.original, written)
        for name in one.before | now:
            if name not in ours and not _same(one.before.get(name, ABSENT), now.get(name, ABSENT)):
                restore(one.original, {name: now.get(name, ABSENT)})
        _replace(one.original, back)


def _stored(config: Any, names: Iterable[str]) -> set[str]:
    """Return how a family stores fields: max_seq_len is a max_position_embeddings."""
    return {config.attribute_map.get(name, name) for name in names}


def _fields(config: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: vars(config).get(name, ABSENT) for name in names}


def _holders(model: nn.Module) -> Iterator[Any]:
    """Yield whatever may hold a configuration of ``model``: modules, and records of its parts."""
    for module in model.modules():
        yield module
        yield from vars(module).get(_SEPARATED, ())


def _configurations(model: nn.Module) -> Iterator[Any]:
    """Yield every configuration that a module holds, and those within, each once."""
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig) and id(value) not in seen:
                for one in nested(value):
                    if id(one) not in seen:
                        seen.add(id(one))
                        yield one


def _replace(holder: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Replace attributes of an object that are the first of a pair by the second."""
    others = {id(old): new for old, new in pairs}
    for name, value in vars(holder).items():
        if id(value) in others:
            vars(holder)[name] = others[id(value)]  # the same keys, so that iteration goes on


def _frozen(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration, unaffected by changes inside lists and dicts."""
    plain = (dict, list)
    return {
        name: copy.deepcopy(value) if isinstance(value, plain) else value
        for name, value in vars(config).items()
    }


def _same(one: Any, other: Any) -> bool:
    """Whether two fields are the same object, or equal plain values."""
    plain = (dict, list, tuple, str, int, float)
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)


def wrap(holder: Any, name: str, function: Callable[..., Any], changes: Changes) -> None:
    """Replace a method, if it exists, by ``function(original, ...)``."""
    if hasattr(type(holder), name):
        original = getattr(holder, name)
        call: Any = functools.partial(function, original)
        call.__wrapped__ = original  # transformers inspects its signature
        set_attribute(holder, name, value=call, changes=changes)


class Hooked:
    """First base class of modules with a patch's hook.

    Compiled graphs are guarded by a module's class and not by its hooks. If hooked modules kept
    their class, a graph compiled without the hook would be reused for them.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # copies and pickles keep the mark
        return _rebuild, type(self).__bases__[1:], vars(self)


def mark_hooked(module: Any, changes: Changes) -> None:
    """Replace a module's class with a subclass of the same name until ``changes`` are undone."""
    cls = type(module)
    if not issubclass(cls, Hooked):
        changes.append(functools.partial(setattr, module, "__class__", cls))
        module.__class__ = _hooked(cls)


@functools.cache
def _hooked(cls: type) -> type:
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (Hooked, cls), names)


def _rebuild(cls: type) -> Any:
    child: Any = _hooked(cls)  # pyright types `type.__new__` as returning classes
    return child.__new__(child)


def guard_buffers(site: RotarySite, changes: Changes) -> None:
    """Write the loaded frequencies, whether or not a patch changes them.

    This undoes rounding by casts, and protects all frequencies of the model from later casts, so
    that leaving and reentering a patch restores them. Call it before any other change to the site.
    """
    module = site.module
    buffers = {name: module.get_buffer(name).detach().clone() for name in site.buffers}
    changes.append(functools.partial(_restore, site, buffers))
    names = ("attention_scaling", site.scaling_attribute, "_is_hf_initialized")
    keep_attributes(module, names, changes)
    wrap(module, name="_apply", function=functools.partial(_apply, site), changes=changes)
    if not site.moving:
        write_buffers(site, site.loaded, site.scaling)
    elif site.rounded:
        for name in site.buffers:
            _put(module, name, site.loaded)


def write_buffers(site: RotarySite, inv_freq: Tensor, scaling: float) -> None:
    """Write ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` to a guarded rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are rewritten
    from float32 whenever the module's tensors are replaced.
    """
    site.values.update(dict.fromkeys(site.buffers, inv_freq))
    vars(site.module)["_is_hf_initialized"] = True  # stops reinitialization by transformers
    setattr(site.module, site.scaling_attribute, scaling)
    _rewrite(site)


def grow_buffers(site: RotarySite, changes: Changes) -> None:
    """Enable transformers' own dynamic scaling, which depends on the longest position seen.

    It reads its factor from ``module.config.rope_parameters``.
    """
    module: Any = site.module
    lengths = ("max_seq_len_cached", "original_max_seq_len")
    keep_attributes(module, ("rope_type", *lengths, f"{site.prefix}{lengths[0]}"), changes)
    site.values.clear()
    for name in lengths:
        setattr(module, name, site.rope.length)
    if isinstance(module.rope_type, dict):
        module.rope_type = {**module.rope_type, site.layer_type: "dynamic"}
    else:
        module.rope_type = "dynamic"


class Grown:
    """What transformers' own dynamic scaling has stored in ``decoder``: lengths and frequencies."""

    def __init__(self, decoder: nn.Module) -> None:
        self.stored = {}
        for module in decoder.modules():
            lengths = {k: v for k, v in vars(module).items() if k.endswith("max_seq_len_cached")}
            if lengths:
                buffers = {
                    name: x.detach().clone() for name, x in module._buffers.items() if x is not None
                }
                self.stored[module] = lengths, buffers

    def put_back(self) -> None:
        """Continue from there, after the same patch was applied again."""
        for module, (lengths, buffers) in self.stored.items():
            vars(module).update(lengths)
            for name, value in buffers.items():
                if not value.is_meta and not module.get_buffer(name).is_meta:
                    _put(module, name, value)


def _restore(site: RotarySite, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        materialized = value.is_meta and not site.module.get_buffer(name).is_meta
        _put(site.module, name, site.loaded if materialized else value)


def _apply(site: RotarySite, original: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Replacement for a rotary module's ``_apply``, with which torch replaces its tensors."""
    module = original(*args, **kwargs)
    _rewrite(site)
    return module


def _rewrite(site: RotarySite) -> None:
    for name, value in site.values.items():
        if not site.module.get_buffer(name).is_meta:  # written when it is materialized
            _put(site.module, name, value)


@torch.no_grad()
def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Write a buffer, in place if possible, since compiled graphs keep its memory address."""
    buffer = module.get_buffer(name)
    replaced = buffer.is_meta or buffer.is_inference()
    if replaced or buffer.dtype != value.dtype or buffer.shape != value.shape:
        device = value.device if value.is_meta else buffer.device
        module._buffers[name] = value.to(device, copy=True)
    else:
        buffer.copy_(value)
