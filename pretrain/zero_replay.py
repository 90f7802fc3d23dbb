"""What ZeRO-3 gathers in a micro-step: deepspeed 0.19.8's bookkeeping (`PartitionedParameterCoordinator`) replayed without a model.

DeepSpeed records in which order modules run, and from the second micro-step on fetches what a module needs, prefetches what the next
ones need, and frees a parameter after a use unless it is persistent, already claimed by a later use, or used again within
`stage3_max_reuse_distance` elements. The core counts as one module where it is a leaf.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from model.config import GRTConfig
from pretrain.parameters import Parameter, rank_parameters


@dataclass(frozen=True)
class ZeroSettings:
    """The settings of DeepSpeed's config that decide, in elements."""

    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    persistence_threshold: int
    reduce_bucket: int
    sequential: bool  # one all-gather a parameter, else one a fetch

    @classmethod
    def of(cls, ds_config: dict[str, Any]) -> "ZeroSettings":
        """From a config that `load_ds_config` has completed."""
        zero = ds_config["zero_optimization"]
        sequential = zero.get("stage3_allgather_sequential", False)
        return cls(
            1 if sequential else zero["stage3_prefetch_bucket_size"],  # so does DeepSpeed
            zero["stage3_max_live_parameters"],
            zero["stage3_max_reuse_distance"],
            zero["stage3_param_persistence_threshold"],
            zero["reduce_bucket_size"],
            sequential,
        )


@dataclass(frozen=True)
class Visit:
    """A module begins to run, forward or backward, or has ended."""

    module: str
    begins: bool


@dataclass
class Gathers:
    """All-gathers of one micro-step on each rank."""

    calls: int = 0
    parameters: list[Parameter] = field(default_factory=list)  # one entry a gather of it
    most_live: int = 0  # elements that are whole at once, persistent ones included


def small(parameters: Sequence[Parameter], settings: ZeroSettings) -> list[Parameter]:
    """Those that DeepSpeed keeps whole, and gathers one by one after each optimizer step."""
    return [parameter for parameter in parameters if parameter.numel <= settings.persistence_threshold]


def _kept(parameters: Sequence[Parameter], residency: str, settings: ZeroSettings) -> list[Parameter]:
    """Those that are not freed after a use: small ones, and with residency `step` core and tied embedding."""
    has_core = any(parameter.part == "core" for parameter in parameters)
    with_step = ("core", "embedding") if residency == "step" and has_core else ()
    large = [p for p in parameters if p.part in with_step and p.name != "embedding.positions.weight"]
    return [*small(parameters, settings), *large]


def visits(model: GRTConfig, depth: int, leaf: bool, hoist: bool) -> Iterator[Visit]:
    """Modules in the order of one forward and backward pass; what leaves compute again is not seen."""
    forward = list(_forward(model, depth, leaf, hoist))
    yield from forward
    # DeepSpeed does not notice the end of a backward of modules whose inputs have no gradient, nor, of a module that ran several times,
    # of any but the first: what it has gathered for these stays until the end.
    unnoticed = {"", "embedding", "embedding.tokens", "embedding.positions"}
    for visit in reversed(forward):
        if not visit.begins:
            yield Visit(visit.module, True)
        elif visit.module not in unnoticed:
            unnoticed.add(visit.module)
            yield Visit(visit.module, False)


def _forward(model: GRTConfig, depth: int, leaf: bool, hoist: bool) -> Iterator[Visit]:
    def block(name: str) -> Iterator[Visit]:
        if leaf:
            return _whole(name)
        mlp = ("up", "gate", "down") if model.mlp == "swiglu" else ("up", "down")
        children = [
            *_whole(f"{name}.attention_norm"),
            *_whole(f"{name}.attention", _each(f"{name}.attention", ("q", "k", "v", "out"))),
            *_whole(f"{name}.mlp_norm"),
            *_whole(f"{name}.mlp", _each(f"{name}.mlp", mlp)),
        ]
        return _whole(name, children)

    def blocks(name: str, count: int) -> Iterator[Visit]:
        for i in range(count):
            yield from block(f"{name}.{i}")

    def recurrences() -> Iterator[Visit]:
        if hoist and depth:
            yield from _whole("core.gate.anchor_norm")
        plain = ("anchor_norm", *(("input_norm",) if model.gate_input_norm else ()), "w1")
        for _ in range(depth):
            yield from _whole("core.gate", _each("core.gate", ("state_norm", *(() if hoist else plain), "w2")))
            if not hoist:
                yield from _whole("core.projection")
            yield from blocks("core.blocks", model.core_blocks)

    embeddings = ("tokens", "positions") if model.position == "learned" else ("tokens",)
    children = [*_whole("embedding", _each("embedding", embeddings)), *blocks("prelude", model.prelude_blocks)]
    if model.core_blocks:
        children += _whole("core", () if leaf else recurrences())
    children += [*blocks("coda", model.coda_blocks), *_whole("final_norm"), *_whole("head")]
    return _whole("", children)


def _whole(name: str, children: Iterable[Visit] = ()) -> Iterator[Visit]:
    yield Visit(name, True)
    yield from children
    yield Visit(name, False)


def _each(parent: str, names: Iterable[str]) -> Iterator[Visit]:
    for name in names:
        yield from _whole(f"{parent}.{name}")


@cache
def gathers(
    model: GRTConfig, tensor_parallel: int, depth: int, residency: str, hoist: bool, settings: ZeroSettings, first: bool
) -> Gathers:
    """Of one micro-step: the first of an optimizer step, or a later one. In the first of a run DeepSpeed records, and gathers more."""
    leaf = residency != "every_use"
    parameters = rank_parameters(model, tensor_parallel)
    owned = _owned(parameters, leaf, hoist)
    kept = _kept(parameters, residency, settings)
    whole = small(parameters, settings) if first else kept
    return _Replay(list(visits(model, depth, leaf, hoist)), owned, {p.name for p in kept}, {p.name for p in whole}, settings).run()


def _owned(parameters: Sequence[Parameter], leaf: bool, hoist: bool) -> dict[str, list[Parameter]]:
    """Parameters that each module needs, its own or, as ZeRO-3 finds out, another's: the head reads the tied embedding, and hoisting is
    done by the core's own forward."""
    owned: dict[str, list[Parameter]] = defaultdict(list)
    hoisted = ("core.projection", "core.gate.w1", "core.gate.input_norm") if hoist else ()
    for parameter in parameters:
        module = parameter.module
        if parameter.part == "core" and (leaf or module in hoisted):
            module = "core"
        elif leaf and parameter.part in ("prelude", "coda"):
            module = ".".join(module.split(".")[:2])  # its block
        owned[module].append(parameter)
    owned["head"] = [parameters[0]]
    return owned


class _Replay:
    def __init__(
        self, order: list[Visit], owned: dict[str, list[Parameter]], kept: set[str], whole: set[str], settings: ZeroSettings
    ) -> None:
        self.order, self.owned, self.kept, self.whole, self.settings = order, owned, kept, whole, settings
        self.modules = [visit.module for visit in _beginnings(order)]
        self.queue = deque((p, step) for step, module in enumerate(self.modules) for p in owned.get(module, []))
        self.claimed: dict[str, int] = defaultdict(lambda: -1)  # the latest step that a parameter has been fetched for
        self.active: dict[str, set[str]] = defaultdict(set)
        self.live_counted = 0
        self.step = 0
        self.result = Gathers()
        self.sizes = {p.name: p.numel for parameters in owned.values() for p in parameters}

    def run(self) -> Gathers:
        self._note_live()
        for visit in self.order:
            if visit.begins:
                self._fetch(visit.module)
                self.step += 1
            else:
                self._release(visit.module)
        return self.result

    def _fetch(self, module: str) -> None:
        needed = self.owned.get(module, [])
        self._gather(needed)
        for parameter in needed:
            self.active[parameter.name].add(module)
        expected = {p.name for p in needed if self.claimed[p.name] < self.step}
        popped: set[str] = set()
        while self.queue and len(popped) < len(expected):
            parameter, step = self.queue.popleft()
            self.claimed[parameter.name] = step
            popped.add(parameter.name)
        assert popped == expected, (module, popped, expected)
        self._prefetch()

    def _prefetch(self) -> None:
        room = min(self.settings.max_live - self.live_counted, self.settings.prefetch_bucket)
        ahead: dict[str, Parameter] = {}
        elements = 0
        while self.queue and elements < room:
            parameter, step = self.queue.popleft()
            self.claimed[parameter.name] = max(self.claimed[parameter.name], step)
            if parameter.name not in self.whole and parameter.name not in ahead:
                ahead[parameter.name] = parameter
                elements += parameter.numel
        self._gather(list(ahead.values()))

    def _gather(self, parameters: Sequence[Parameter]) -> None:
        missing = [p for p in parameters if p.name not in self.whole]
        if missing:
            self.result.calls += len(missing) if self.settings.sequential else 1
            self.result.parameters += missing
            self.whole |= {p.name for p in missing}
            self.live_counted += sum(p.numel for p in missing)
            self._note_live()

    def _note_live(self) -> None:
        self.result.most_live = max(self.result.most_live, sum(self.sizes[name] for name in self.whole))

    def _release(self, module: str) -> None:
        used = self.owned.get(module, [])
        releasable = {p.name for p in used if p.name not in self.kept and self.claimed[p.name] <= self.step}
        passed = 0
        for later in self.modules[self.step :]:
            if passed >= self.settings.max_reuse_distance:
                break
            for parameter in self.owned.get(later, []):
                releasable.discard(parameter.name)
                passed += parameter.numel
        for parameter in used:
            self.active[parameter.name].discard(module)
            if parameter.name in releasable and parameter.name in self.whole and not self.active[parameter.name]:
                self.whole.remove(parameter.name)
                self.live_counted -= parameter.numel


def _beginnings(order: list[Visit]) -> list[Visit]:
    return [visit for visit in order if visit.begins]
