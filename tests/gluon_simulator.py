"""Runs the text of a Gluon kernel for Hopper on the CPU: numpy stands for Gluon, one greenlet for each of its warps.

A warp gives control back before everything that another can see or that is asynchronous; which one goes on, and when a
copy lands, is drawn at random. A `Fault` is raised for what a GPU would turn into a hang or a wrong number on some
days: a deadlock, shared memory overwritten under a reader, an unbalanced barrier, an int32 that overflows. Programs run
one after the other or, on a `Grid`, beside each other.
"""

from __future__ import annotations

import contextvars
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from greenlet import getcurrent, greenlet

GLUON = "triton.experimental.gluon"


class Fault(Exception):
    """The kernel does what it must not, in this interleaving."""


class Int32(int):
    """A Triton integer: overflow, and division of negatives, which rounds otherwise than in Python, are faults."""

    def _checked(name: str) -> Callable[[Int32, Any], Any]:  # type: ignore[misc]
        function = getattr(int, name)
        divides = "div" in name or "mod" in name

        def operate(self: Int32, other: Any) -> Any:
            if not isinstance(other, int):
                return NotImplemented
            if divides and (self < 0 or other < 0):
                raise Fault(f"division of a negative: {int(self)} {name} {int(other)}")
            result = function(int(self), int(other))
            if not -(2**31) <= result < 2**31:
                raise Fault(f"int32 overflows: {int(self)} {name} {int(other)}")
            return Int32(result)

        return operate

    for _name in ("add", "sub", "mul", "and", "xor", "rshift", "floordiv", "mod"):
        locals()[f"__{_name}__"] = _checked(f"__{_name}__")
        locals()[f"__r{_name}__"] = _checked(f"__r{_name}__")

    # What a constexpr holds.
    value = property(int)

    def to(self, dtype: str) -> int:
        """int64, which is not checked."""
        return int(self)


class Tensor(np.ndarray):
    """Values in registers, fp32 whatever they are converted to."""

    def to(self, dtype: str) -> Tensor:
        return self

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return np.transpose(self, order)


def _tensor(values: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


class Address(int):
    """A pointer as an integer; null is 0."""

    pointer: Pointer


@dataclass
class Pointer:
    """Where a kernel reads or writes, `memory[offset]`; null without memory."""

    memory: np.ndarray | None
    offset: Any = 0
    dtype = SimpleNamespace(element_ty="float32")

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.offset)

    def to(self, dtype: str, bitcast: bool = False) -> Any:
        if bitcast:
            assert self.memory is not None
            return Pointer(self.memory.view(dtype), self.offset)
        address = Address(0 if self.memory is None else 4096)
        address.pointer = self
        return address

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Any = True, other: float = 0.0) -> Tensor:
        """All of it must lie inside, except what is masked."""
        offsets = np.asarray(self.offset)
        mask = np.broadcast_to(mask, offsets.shape)
        wanted = offsets[mask]
        values = np.full(offsets.shape, other, np.float32)
        if wanted.size:
            if self.memory is None or wanted.min() < 0 or wanted.max() >= self.memory.size:
                raise Fault("a load is out of bounds")
            values[mask] = self.memory[wanted]
        return _tensor(values)

    def add(self) -> Int32:
        """Count one more."""
        _pause("count")
        assert self.memory is not None
        self.memory[self.offset] += 1
        return Int32(self.memory[self.offset] - 1)


@dataclass
class Counter:
    """An int32 in global memory that programs draw tiles from; which one gets the next is drawn at random.

    Programs run one after the other here, so the draws of all are dealt out beforehand: `draws[program]`.
    """

    draws: list[list[int]]
    tiles: int
    last: int = -1

    def add(self) -> Int32:
        _pause("draw")
        if not self.draws[Program.current.index]:
            raise Fault("a program draws once more than it has tiles")
        self.last = self.draws[Program.current.index].pop(0)
        return Int32(self.last)

    def store(self, value: int, mask: bool) -> None:
        _pause("reset the counter")
        if value != 0 or mask != (self.last == self.tiles - 1):
            raise Fault(f"counter set to {value} ({mask}) after {self.last} of {self.tiles} draws")


def _deal(programs: int, tiles: int, chance: random.Random) -> Counter:
    """Every program draws tiles that are left, at last one that is not there."""
    draws: list[list[int]] = [[] for _ in range(programs)]
    for count in range(tiles - programs):
        draws[chance.randrange(programs)].append(count)
    for count, program in enumerate(chance.sample(range(programs), programs)):
        draws[program].append(tiles - programs + count)
    return Counter(draws, tiles)


class Cell:
    """A number in shared memory that the producer tells all consumers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Int32 | None = None
        self.readers: dict[str, int] = {}

    def store(self, value: Int32) -> None:
        _pause("store a number")
        if self.value is not None and len(self.readers) < len(Program.current.warps) - 1:
            raise Fault(f"{self.name} is overwritten, only {self.readers} have read it")
        self.value, self.readers = value, {}

    def load(self, layout: Any) -> Int32:
        _pause("load a number")
        reader = Program.current.warp().name
        if self.value is None or self.readers.get(reader, 0) == Program.current.hearings:
            raise Fault(f"{self.name} is read before it is written")
        self.readers[reader] = self.readers.get(reader, 0) + 1
        return self.value


class Descriptor:
    """A tensor that TMA copies block by block, and how often each of its rows was written."""

    dtype, layout = "float", None

    def __init__(self, name: str, array: np.ndarray, block: list[int]) -> None:
        self.name, self.array, self.block = name, array, block
        self.block_type = SimpleNamespace(nbytes=2 * int(np.prod(block)), shape=block)
        self.writes = np.zeros(array.shape[:-1], int)


class Barrier:
    """An mbarrier: its phase ends when all have arrived and all bytes have landed. Methods as in Gluon's `mbarrier`."""

    MBarrierLayout = SimpleNamespace

    def __init__(self, name: str) -> None:
        self.name, self.phase, self.bytes = name, 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = int(count)

    def change(self, arrivals: int = 0, expected: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += expected
        if self.pending < 0:
            raise Fault(f"too many arrive at {self.name}")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def wait(self, phase: int, pred: bool = True) -> None:
        if pred:
            _pause(f"wait for {self.name}, phase {int(phase)}", lambda: self.phase & 1 != phase)
        else:
            Program.current.warp().idle = True

    def arrive(self, count: int = 1, pred: bool = True) -> None:
        _pause("arrive")
        if pred:
            self.change(arrivals=count)

    def expect(self, size: int) -> None:
        _pause("expect")
        self.change(arrivals=1, expected=size)


class Slot:
    """One place in shared memory: what lies there and who is at it."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name = name
        self.data = np.full(shape, np.nan, np.float32)
        # "q_desc" or another once a copy has landed, "registers" after a store, "turned" after one of who loads.
        self.holds: str | None = None
        self.products = self.copies_in = self.copies_out = 0
        self.reads: dict[str, int] = {}
        # Warps whose loads of it may still be under way: until a product takes what they make of them.
        self.loading: set[str] = set()
        self.fenced, self.writer = True, ""

    def reshape(self, shape: list[int]) -> View:
        return View(self, lambda data: data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> View:
        return View(self, lambda data: data).permute(order)

    def slice(self, start: int, length: int, dim: int) -> View:
        return View(self, lambda data: data).slice(start, length, dim)

    def store(self, values: np.ndarray) -> None:
        View(self, lambda data: data).store(values)

    def check_free(self, why: str) -> None:
        if self.products or self.copies_in or self.copies_out:
            users = (self.products, self.copies_in, self.copies_out)
            raise Fault(f"{why}: {self.name} is in use by {users} products, copies in and copies out")
        if self.loading:
            raise Fault(f"{why}: {self.name} is still being loaded by {self.loading}")

    def check_read(self, why: str) -> None:
        """Consumers read a block that streams as often as the kernel says, or skip it, and others at least once."""
        right = bool(self.reads) or self.holds in (None, "registers")
        if self.holds in Program.current.reads:
            program, times = Program.current, Program.current.reads[self.holds]
            everyone = {warp.name: times for warp in program.warps if warp.name.startswith("consumer")}
            right = set(self.reads.values()) == {times} if program.skips else self.reads == everyone
        if not right:
            raise Fault(f"{why}: {self.name} with {self.holds} was read by {self.reads}")


class View:
    """Shared memory in another shape."""

    def __init__(self, slot: Slot, shaped: Callable[[np.ndarray], np.ndarray]) -> None:
        self.slot, self.shaped = slot, shaped

    def permute(self, order: tuple[int, ...]) -> View:
        return View(self.slot, lambda data: np.transpose(self.shaped(data), order))

    def slice(self, start: int, length: int, dim: int) -> View:
        place = (*[slice(None)] * dim, slice(start, start + length))
        return View(self.slot, lambda data: self.shaped(data)[place])

    @property
    def values(self) -> np.ndarray:
        return self.shaped(self.slot.data)

    def load(self, layout: Any) -> Tensor:
        _pause("load from shared memory")
        reader = Program.current.warp().name
        if self.slot.copies_in or self.slot.holds is None:
            raise Fault(f"{reader} loads {self.slot.name} before its copy")
        self.slot.reads[reader] = self.slot.reads.get(reader, 0) + 1
        self.slot.loading.add(reader)
        return _tensor(self.values.copy())

    def store(self, values: np.ndarray) -> None:
        _pause("store to shared memory")
        slot, writer = self.slot, Program.current.warp().name
        slot.check_free("store")
        if writer == "load":
            # What it stores, it has loaded, part by part.
            for each in Program.current.slots:
                each.loading.discard(writer)
        elif slot.holds not in Program.current.reads:
            slot.check_read("store")
        if writer != "load" or slot.fenced:
            if writer == "load" and slot.holds is not None:
                slot.check_read("store")
            slot.data, slot.reads = np.full(slot.data.shape, np.nan, np.float32), {}
        slot.holds, slot.fenced, slot.writer = "turned" if writer == "load" else "registers", False, writer
        self.values[...] = values


class Ring(list[Any]):
    """Barriers or slots in a row."""

    def index(self, index: int) -> Any:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise Fault(f"place {index} of {len(self)}")
        return self[index]


class Product:
    """A wgmma under way; its value is there once it was waited for."""

    def __init__(self, a: View | Tensor, b: View, acc: Tensor | Product, use_acc: bool, checked: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.slots = [operand.slot for operand in (a, b) if isinstance(operand, View)] if checked else []
        self.value: Tensor | None = None

    def finish(self, reader: str) -> None:
        a = self.a.values if isinstance(self.a, View) else np.asarray(self.a)
        product = a @ self.b.values
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = _tensor(product + acc if self.use_acc else product)
        for slot in self.slots:
            slot.products -= 1
            slot.reads[reader] = slot.reads.get(reader, 0) + 1


class Warp:
    """The warp that loads or a warpgroup that computes."""

    def __init__(self, name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        def body() -> None:
            with np.errstate(all="ignore"):
                function(*arguments)

        self.name = name
        self.greenlet = greenlet(body)
        self.greenlet.gr_context = contextvars.copy_context()
        self.ready: Callable[[], bool] = lambda: True
        self.doing = "start"
        # Those that still read shared memory, and those that have not arrived.
        self.copies_out = self.arriving = 0
        self.products: list[Product] = []
        # After a wait that was predicated off, products of shared memory are computed for nobody.
        self.idle = False


# How often a consumer reads each block that streams, by descriptor.
FORWARD_READS: Mapping[str | None, int] = {"k_desc": 1, "v_desc": 1}


class Program:
    """One block of threads: its shared memory, its warps and what is under way."""

    current: Program

    def __init__(
        self,
        index: int,
        programs: int,
        chance: random.Random,
        reads: Mapping[str | None, int] = FORWARD_READS,
        skips: bool = False,
        grid: Grid | None = None,
    ) -> None:
        self.index, self.programs, self.chance, self.reads, self.skips = index, programs, chance, reads, skips
        self.grid = grid
        # How often a warp reads a number that it is told.
        self.hearings = 1 if grid is None else 2
        self.slots: list[Slot] = []
        self.warps: list[Warp] = []
        self.landings: list[Callable[[], None]] = []
        # Who stands at each named barrier, and how often it was passed.
        self.standing: dict[str, dict[str, str]] = {}
        self.passed: dict[str, int] = {}

    def warp(self) -> Warp:
        here = getcurrent()
        return next(warp for warp in self.warps if warp.greenlet is here)

    def run(self, functions: list[tuple[Any, ...]]) -> None:
        """Now, or on the grid that it belongs to when that runs."""
        others = ["load", "write"] if functions[-1][0].__name__ == "write" else ["load"]
        names = [*(f"consumer {number}" for number in range(len(functions) - len(others))), *others]
        self.warps = [Warp(name, *called) for name, called in zip(names, functions, strict=True)]
        grid = self.grid or Grid(1, self.chance)
        grid.waiting.append(self)
        if self.grid is None:
            grid.run()

    def check_exit(self) -> None:
        if any(self.standing.values()):
            raise Fault(f"named barriers are left unbalanced: {self.standing}")
        for slot in self.slots:
            slot.check_free("exit")
            slot.check_read("exit")


class Grid:
    """Programs beside each other, as many at a time as are `resident`; when one has left, any other starts."""

    def __init__(self, resident: int, chance: random.Random) -> None:
        self.resident, self.chance = resident, chance
        self.waiting: list[Program] = []

    def run(self) -> None:
        everyone = list(self.waiting)
        try:
            self._schedule()
        finally:
            for program in everyone:
                for warp in program.warps:
                    warp.greenlet.throw()

    def _schedule(self) -> None:
        """Until all is done: let a warp go on or a copy land, by weights or by priorities that change now and then."""
        chance, running = self.chance, list[Program]()
        Who = tuple[Program, Warp | None]
        everyone: list[Who] = [(program, who) for program in self.waiting for who in (*program.warps, None)]
        weights = {who: chance.choice((0.01, 0.1, 1.0, 10.0)) for who in everyone}
        by_priority, in_order = chance.random() < 0.4, chance.random() < 0.5
        while self.waiting or running:
            while self.waiting and len(running) < self.resident:
                running.append(self.waiting.pop(chance.randrange(len(self.waiting))))
            able: list[Who] = [
                (program, warp)
                for program in running
                for warp in program.warps
                if not warp.greenlet.dead and warp.ready()
            ]
            able += [(program, None) for program in running if program.landings]
            if not able:
                alive = ((each, warp) for each in running for warp in each.warps if not warp.greenlet.dead)
                raise Fault("deadlock: " + "; ".join(f"{each.index} {warp.name}: {warp.doing}" for each, warp in alive))
            if by_priority and chance.random() < 0.01:
                chance.shuffle(everyone)
            if by_priority:
                picked = min(able, key=everyone.index)
            else:
                (picked,) = chance.choices(able, [weights[who] for who in able])
            program, warp = picked
            Program.current = program
            if warp is None:
                program.landings.pop(0 if in_order else chance.randrange(len(program.landings)))()
            else:
                warp.greenlet.switch()
                if warp.greenlet.dead and (warp.copies_out or warp.products):
                    raise Fault(f"{warp.name} leaves with copies or products under way")
            if not program.landings and all(each.greenlet.dead for each in program.warps):
                program.check_exit()
                running.remove(program)


def _pause(doing: str, ready: Callable[[], bool] = lambda: True) -> None:
    """Let others go on, at least until `ready`; before there are warps there is nobody else."""
    if Program.current.warps:
        warp = Program.current.warp()
        warp.doing, warp.ready = doing, ready
        warp.greenlet.parent.switch()


def _copy_in(source: Descriptor, start: list[int], barrier: Barrier, slot: Slot) -> None:
    _pause("copy in")
    why = f"copy of {source.name}{[int(index) for index in start]}"
    slot.check_free(why)
    slot.check_read(why)
    *outer, row, column = start
    if not (
        row >= 0 and column >= 0 and all(0 <= place < source.array.shape[axis] for axis, place in enumerate(outer))
    ):
        raise Fault(f"{why} is outside")
    slot.copies_in, slot.reads, slot.holds = 1, {}, None
    slot.data = np.full(slot.data.shape, np.nan, np.float32)

    def land() -> None:
        block = np.zeros(source.block, np.float32)
        part = source.array[tuple(slice(place, place + size) for place, size in zip(start, source.block, strict=True))]
        block[tuple(slice(size) for size in part.shape)] = part
        slot.data, slot.copies_in, slot.holds = block.reshape(slot.data.shape), 0, source.name
        barrier.change(expected=-source.block_type.nbytes)

    Program.current.landings.append(land)


def _copy_out(target: Descriptor, start: list[int], slot: Slot, add: bool = False) -> None:
    _pause("copy out")
    if slot.holds != "registers" or not slot.fenced:
        raise Fault(f"copy out of {slot.name}, which holds {slot.holds}, fenced: {slot.fenced}")
    program, warp = Program.current, Program.current.warp()
    where = tuple(slice(place, place + size) for place, size in zip(start[:-1], target.block[:-1], strict=True))
    slot.copies_out += 1
    warp.copies_out += 1
    warp.arriving += 1

    def leave() -> None:
        data = slot.data.reshape(target.block).copy()
        slot.copies_out -= 1
        warp.copies_out -= 1

        def arrive() -> None:
            part = target.array[where]
            new = data[tuple(slice(size) for size in part.shape)]
            part[...] = part + new if add else new
            target.writes[where] += 1
            warp.arriving -= 1

        program.landings.append(arrive)

    program.landings.append(leave)


def _add_out(target: Descriptor, start: list[int], slot: Slot) -> None:
    _copy_out(target, start, slot, add=True)


def _store_wait(pendings: int) -> None:
    warp = Program.current.warp()
    _pause("wait for copies out", lambda: warp.copies_out <= pendings)


def _mma(
    a: Slot | View | Tensor, b: View, acc: Tensor | Product, use_acc: bool = True, is_async: bool = False
) -> Product:
    _pause("wgmma")
    if isinstance(a, Slot):
        a = a.reshape(list(a.data.shape))
    warp = Program.current.warp()
    idle = warp.idle and isinstance(a, View)
    warp.idle = warp.idle and not idle
    if not isinstance(a, View) or (use_acc and not isinstance(acc, Product)):
        for slot in Program.current.slots:
            slot.loading.discard(warp.name)
    product = Product(a, b, acc, use_acc, checked=not idle)
    for slot in product.slots:
        if slot.copies_in or slot.holds is None or not slot.fenced:
            raise Fault(f"wgmma of {warp.name} reads {slot.name} before its copy or a fence")
        slot.products += 1
    warp.products.append(product)
    return product


def _mma_wait(pendings: int, deps: list[Product]) -> Any:
    _pause("wait for wgmma")
    warp = Program.current.warp()
    while len(warp.products) > pendings:
        warp.products.pop(0).finish(warp.name)
    values = tuple(product.value for product in deps)
    if any(value is None for value in values):
        raise Fault(f"{warp.name} waits for another product than it takes")
    return values[0] if len(values) == 1 else values


def _fence() -> None:
    _pause("fence")
    warps = Program.current.warps
    for slot in Program.current.slots:
        slot.fenced = slot.fenced or not warps or slot.writer == Program.current.warp().name


# Four values of P in a register.
_WORD = np.dtype((np.void, 16))


def _packed(values: list[Tensor]) -> Tensor:
    """Not rounded, so that errors of another kind show."""
    return _tensor(np.ascontiguousarray(np.stack(values, -1)).view(_WORD)[..., 0])


def _unpacked(words: Tensor) -> Tensor:
    """Of words of which each stands in four places, one value for each."""
    values = np.ascontiguousarray(words)[..., None].view(np.float32)
    which = np.broadcast_to(np.arange(words.shape[-1]) % 4, words.shape)
    return _tensor(np.take_along_axis(values, which[..., None], -1)[..., 0])


def _assembly(text: str, _: str, operands: list[Any], **__: Any) -> Any:
    """A wait for a lock, its release behind all copies out, a named barrier, or four values of P in a register."""
    if "cvt.rn.satfinite.e4m3x2.f32" in text:
        return _packed(operands)
    if text == "mov.b32 $0, $1;":
        return _unpacked(*operands)
    if "ld.acquire.gpu" not in text and "st.release.gpu" not in text:
        return _named_barrier(text)
    address, number = operands
    memory, offset = address.pointer.memory, address.pointer.offset
    if "ld.acquire.gpu" in text:
        _pause(f"wait for lock {int(offset)} to be {int(number)}", lambda: memory[offset] == number)
    else:
        warp = Program.current.warp()
        _pause("release a lock", lambda: warp.arriving == 0 or "cp.async.bulk.wait_group 0;" not in text)
        memory[offset] = number
    return Int32(0)


def _named_barrier(text: str) -> Int32:
    """`bar.sync` and `bar.arrive` of two warpgroups."""
    match = re.match(r"bar\.(sync|arrive) (\d+), 256;", text)
    if match is None:
        raise Fault(f"unknown assembly: {text}")
    kind, barrier = match.groups()
    _pause(match[0])
    program = Program.current
    standing, passed = program.standing.setdefault(barrier, {}), program.passed.setdefault(barrier, 0)
    # On a grid both wait for each other, else in turn.
    if program.warp().name in standing or (kind in standing.values() and program.grid is None):
        raise Fault(f"named barrier {barrier}: {program.warp().name}, {kind}, meets {standing}")
    standing[program.warp().name] = kind
    if len(standing) == 2:
        standing.clear()
        program.passed[barrier] += 1
    elif kind == "sync":
        _pause(match[0], lambda: program.passed[barrier] > passed)
    return Int32(0)


def _allocate(dtype: str, shape: Sequence[int], layout: Any) -> Ring:
    slots = Program.current.slots
    if dtype == "int32":
        return Ring([Cell(f"number {place}") for place in range(shape[0])])
    if dtype == "int64":
        return Ring([Barrier(f"a barrier's place {place} of {shape[0]}") for place in range(shape[0])])
    new = [Slot(f"shared memory {len(slots) + place}", shape[1:]) for place in range(shape[0])]
    slots.extend(new)
    return Ring(new)


def _store(pointer: Pointer | Counter, values: Any, mask: Any = True) -> None:
    if isinstance(pointer, Counter):
        pointer.store(values, mask)
        return
    _pause("store")
    mask = np.broadcast_to(mask, np.shape(pointer.offset))
    if not mask.any():
        return
    offsets = np.asarray(pointer.offset)[mask]
    if pointer.memory is None or offsets.min() < 0 or offsets.max() >= pointer.memory.size:
        raise Fault("a store is out of bounds")
    if pointer.memory.dtype == np.float32 and not np.isnan(pointer.memory[offsets]).all():
        raise Fault("a row is stored twice")
    pointer.memory[offsets] = np.broadcast_to(values, mask.shape)[mask]


def _exp2(values: Any) -> Any:
    if np.isnan(values).any():
        raise Fault("NaN in exp2")
    return np.exp2(values)


def _elementwise(of_scalars: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """Floats that stand beside tensors are fp32."""

    def apply(*operands: Any) -> Any:
        if any(isinstance(operand, np.ndarray) for operand in operands):
            return _tensor(of_tensors(*(np.float32(each) if isinstance(each, float) else each for each in operands)))
        found = of_scalars(*operands)
        return np.float32(found) if isinstance(found, (float, np.floating)) else Int32(found)

    return apply


def _modules(multiprocessors: int) -> dict[str, Any]:
    """What the text of a kernel imports, by name."""
    language = SimpleNamespace(
        **{dtype: dtype for dtype in ("int32", "int64", "float16", "bfloat16", "float32", "float8e4nv")},
        **{name: getattr(np, name) for name in ("expand_dims", "sum", "log2", "floor", "abs")},
        **{
            f"{name}Layout": lambda *_, **__: None
            for name in (
                "NVMMADistributed",
                "NVMMAShared",
                "DotOperand",
                "Slice",
                "Blocked",
                "SwizzledShared",
                "DistributedLinear",
            )
        },
        max=lambda values, axis: values if isinstance(values, Int32) else np.max(values, axis),
        full=lambda shape, value, *_: Int32(value),
        atomic_add=lambda counter, one, sem: counter.add(),
        constexpr=lambda value: Int32(value) if isinstance(value, int) else value,
        num_programs=lambda axis: Int32(Program.current.programs),
        program_id=lambda axis: Int32(Program.current.index),
        cdiv=lambda a, b: (a + (b - 1)) // b,
        where=_elementwise(lambda condition, a, b: a if condition else b, np.where),
        maximum=_elementwise(max, np.maximum),
        minimum=_elementwise(min, np.minimum),
        static_range=range,
        zeros=lambda shape, *_: _tensor(np.zeros(shape, np.float32)),
        arange=lambda start, end, layout=None: _tensor(np.arange(start, end)),
        convert_layout=lambda values, layout, assert_trivial=False: values,
        split=lambda values: (values[..., 0], values[..., 1]),
        join=lambda a, b: _tensor(np.stack([a, b], -1)),
        exp2=_exp2,
        load=lambda pointer, mask=True, other=0.0: pointer.load(mask, other),
        pointer_type=lambda dtype: dtype,
        cast=lambda value, dtype: int(value),
        store=_store,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=_assembly,
        warp_specialize=lambda functions, warps, registers: Program.current.run(functions),
    )
    hopper = SimpleNamespace(
        fence_async_shared=_fence,
        mbarrier=Barrier,
        tma=SimpleNamespace(
            async_load=_copy_in, async_store=_copy_out, async_atomic_add=_add_out, store_wait=_store_wait
        ),
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
    )
    gluon = SimpleNamespace(jit=lambda function: function, language=language)
    device = SimpleNamespace(multi_processor_count=multiprocessors)
    return {
        "torch": SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _: device)),
        "triton": SimpleNamespace(jit=lambda function: function, language=language, cdiv=lambda a, b: -(-a // b)),
        "triton.language": language,
        "triton._C.libtriton": SimpleNamespace(ir=None),
        f"{GLUON}.language._core": SimpleNamespace(builtin=lambda function: function),
        "triton.experimental": SimpleNamespace(gluon=gluon),
        GLUON: gluon,
        f"{GLUON}.language.nvidia.hopper": hopper,
        f"{GLUON}.nvidia.hopper": SimpleNamespace(TensorDescriptor=None),
    }


def load_text(text: str, multiprocessors: int) -> ModuleType:
    """The module of a generated text; the stand-ins are in `sys.modules` only while it is executed."""
    module = ModuleType("simulated_kernel")
    with patch.dict(sys.modules, _modules(multiprocessors)):
        exec(compile(text, "simulated_kernel.py", "exec"), module.__dict__)
    return module


def simulate(
    text: str,
    operands: Sequence[np.ndarray],
    scale: float,
    multiprocessors: int,
    chance: random.Random,
    skips: bool,
    descales: Sequence[float | np.ndarray] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel makes of q, k and v: o and lse, in an interleaving drawn from `chance`.

    `skips`: whether a consumer may pass a block of keys that it does not see. `descales`: of fp8 inputs, contiguous
    where they are arrays.

    Raises:
        Fault: it does what it must not.
    """
    kernel = load_text(text, multiprocessors)
    q, k, v = operands
    o = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    lse = np.full(q.shape[:3], np.nan, np.float32)
    arrays = (q, k, v, o)
    shapes = (SimpleNamespace(shape=array.shape, is_cuda=True, device=0) for array in arrays)
    tables = [each for each in descales if isinstance(each, np.ndarray)]
    strided = (SimpleNamespace(stride=lambda each=each: [step // 4 for step in each.strides]) for each in tables)
    (programs, _, _), sizes, options = kernel.plan(*shapes, *strided)
    blocks = kernel.BLOCKS[options["PACKED"]]
    _, packed, rows, _ = blocks["q_desc"]
    tiles = q.shape[0] * (q.shape[1] // packed) * -(-q.shape[2] // (rows * int(kernel.CONSUMERS)))
    counter = _deal(programs, tiles, chance) if kernel.SCHEDULE == 2 else Counter([], 0)
    descriptors = [Descriptor(*named) for named in zip(blocks, arrays, blocks.values(), strict=True)]
    for index in range(programs):
        reads = {"k_desc": 1, "turned": 1} if descales else FORWARD_READS
        Program.current = Program(index, programs, chance, reads, skips=skips)
        constants = (Int32(options["STRAIGHT"]), Int32(packed))
        scaling = (Pointer(each.reshape(-1)) if isinstance(each, np.ndarray) else np.float32(each) for each in descales)
        numbers = (*scaling, np.float32(scale), *(Int32(size) for size in sizes), *constants)
        kernel.kernel(*descriptors, Pointer(lse.reshape(-1)), counter, *numbers)
    if any(counter.draws):
        raise Fault(f"tiles are left: {counter.draws}")
    if (descriptors[3].writes != 1).any():
        raise Fault(f"rows of the output are written {np.unique(descriptors[3].writes)} times")
    return o, lse
