"""Accounting of the device memory that models keep between calls, and its offload to the host and back.

What moves is a storage, not a tensor. Every tensor that views a storage (an engine that shares the trainer's weights,
tied weights, the flat shards of FSDP) sees it leave and come back, and nothing is stored twice. Without a device, the
arena simulates one: the same code moves the same storages within host memory, under a limit that stands for the size
of a device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor, UntypedStorage, nn

from coalign.devices import is_accelerator, use_device

CGROUP = Path("/sys/fs/cgroup")
PARTS = ("weights", "gradients", "optimizer", "kv")
Key = tuple[str, str]  # (model, part)


class OutOfDeviceMemory(MemoryError):
    """The device memory limit is reached. The message lists who uses how much."""


@dataclass(slots=True)
class ManagedStorage:
    """A storage of ``size`` bytes, its users in order of registration, and its host buffer (u8[size]), if any."""

    storage: UntypedStorage
    size: int
    users: dict[Key, None] = field(default_factory=dict)
    host: Tensor | None = None
    saved: bool = False  # the host buffer equals the device's bytes
    resident: bool = True  # on the device


class Arena:
    """The memory that the models of one process keep on one ``device``.

    A part of a model is either on the device or offloaded. A storage that several parts use stays on the device as
    long as one of them does, and counts to the first of those. ``limit``: bytes of all parts together (None: no limit
    but the device's own). ``peak``: the most bytes in use since ``begin``. Activations are not counted, nor tensors on
    other devices.
    """

    def __init__(self, device: str, limit: int | None = None) -> None:
        self.device = torch.device(device)
        self.limit = limit
        self.used = self.peak = 0
        # By the address of the storage's record, which does not change when its bytes are freed.
        self._storages: dict[int, ManagedStorage] = {}
        self._parts: dict[Key, list[ManagedStorage]] = {}
        self._offloaded: set[Key] = set()
        self._reserved: dict[Key, int] = {}
        self._books = threading.RLock()  # never held while bytes move
        self._moving = threading.Lock()

    # ---- accounting ------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Restart the measurement of ``peak``. Returns the bytes in use now."""
        with self._books:
            self.peak = self.used
            return self.used

    def settle(self, model: str, part: str, tensors: Iterable[Tensor]) -> None:
        """Set the tensors of a part: new ones are counted, those that are no longer listed are forgotten.

        Raises OutOfDeviceMemory if the total exceeds the limit.
        """
        tensors, key = [t for t in tensors if t.device.type == self.device.type], (model, part)
        make_resizable(tensors)
        found = {storage._cdata: storage for storage in map(get_storage, tensors)}
        with self._books:
            for address in [a for a, managed in self._storages.items() if key in managed.users and a not in found]:
                self._drop(key, address)
            for address, storage in found.items():
                if address not in self._storages:
                    self._storages[address] = ManagedStorage(storage, storage.nbytes())
                    self._count(storage.nbytes())
                if key not in self._storages[address].users:
                    self._storages[address].users[key] = None
                    self._storages[address].saved = False  # the new user may write to it
            self._parts[key] = [self._storages[address] for address in found]
            self._check(0, f"with the {part} of '{model}'")

    def reserve(self, model: str, part: str, size: int) -> None:
        """Count ``size`` bytes of a part whose tensors ``settle`` does not list; 0 ends the reservation.

        Raises OutOfDeviceMemory if they exceed the limit; nothing has changed then.
        """
        with self._books:
            more = size - self._reserved.get((model, part), 0)
            self._check(more, f"for the {part} of '{model}'")
            self._count(more)
            self._reserved[model, part] = size

    def list_resident(self, model: str) -> dict[str, int]:
        """Return the bytes of each part of a model on the device; 0 where other parts count all of its storages."""
        sizes = {}
        with self._books:
            for key in ((model, part) for part in PARTS):
                if self._reserved.get(key) or (self._parts.get(key) and key not in self._offloaded):
                    own = (each.size for each in self._parts.get(key, ()) if self._owner(each) == key)
                    sizes[key[1]] = sum(own) + self._reserved.get(key, 0)
        return sizes

    def list_offloaded(self, model: str) -> dict[str, int]:
        """Return the offloaded parts of a model, each with the bytes that ``reload`` would bring to the device."""
        with self._books:
            keys = [key for key in self._offloaded if key[0] == model]
            return {key[1]: sum(each.size for each in self._parts[key] if not each.resident) for key in keys}

    def models(self) -> list[str]:
        """Return the names of all models that have or had memory here."""
        with self._books:
            return list(dict.fromkeys(model for model, _ in (*self._parts, *self._reserved)))

    def require(self, model: str, parts: Iterable[str], what: str) -> None:
        """Raise RuntimeError unless these parts are on the device: a kernel on freed memory would kill the process."""
        if missing := [part for part in parts if (model, part) in self._offloaded]:
            raise RuntimeError(f"{what} needs {' and '.join(missing)} of '{model}' on the device; they are on the host")

    def table(self) -> str:
        """List the bytes of each part on the device, the largest first."""
        rows = [
            (size, f"{model}: {part}") for model in self.models() for part, size in self.list_resident(model).items()
        ]
        return "\n".join(f"{_mib(size):>14}  {name}" for size, name in sorted(rows, reverse=True))

    # ---- offload and reload ----------------------------------------------------------------------------------------

    def offload(self, model: str, parts: Sequence[str], *, constant: Sequence[str] = ()) -> int:
        """Offload parts to the host. Returns the bytes freed. ``constant`` parts are copied the first time only.

        After an error all of them are still on the device.
        """
        with self._moving:
            keys = [
                (model, part)
                for part in parts
                if self._parts.get((model, part)) and (model, part) not in self._offloaded
            ]
            going = [
                each
                for each in self._storages_of(keys)
                if each.resident and each.users.keys() <= {*keys, *self._offloaded}
            ]
            self._save([each for each in going if not each.saved])
            unchanging = {(model, part) for part in constant}
            with self._books:
                for each in going:
                    each.storage.resize_(0)
                    each.resident, each.saved = False, each.users.keys() <= unchanging
                    self._count(-each.size)
                self._offloaded.update(keys)
            if is_accelerator(self.device):  # other processes can have it
                with use_device(self.device):
                    torch.accelerator.empty_cache()
            return sum(each.size for each in going)

    def reload(self, model: str, parts: Sequence[str]) -> int:
        """Bring offloaded parts back to the device. Returns the bytes copied.

        Raises OutOfDeviceMemory before anything has moved. After any other error the parts still count as offloaded,
        and another call copies the rest.
        """
        with self._moving:
            keys = [(model, part) for part in parts if (model, part) in self._offloaded]
            coming = [each for each in self._storages_of(keys) if not each.resident]
            size = sum(each.size for each in coming)
            with self._books:
                self._check(size, f"for the {' and '.join(part for _, part in keys)} of '{model}'")
            with copy_stream(self.device, after_compute=False):
                for each in coming:
                    assert each.host is not None, "an offloaded storage has a copy on the host"
                    each.storage.resize_(each.size)
                    view_bytes(each.storage).copy_(each.host, non_blocking=True)
                    with self._books:
                        each.resident = True
                        self._count(each.size)
            self._offloaded.difference_update(keys)
            return size

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _save(self, storages: list[ManagedStorage]) -> None:
        """Copy storages to their host buffers, which are allocated the first time and then kept."""
        new = [each for each in storages if each.host is None]
        buffers = allocate_host([each.size for each in new], pinned=is_accelerator(self.device))
        for each, buffer in zip(new, buffers, strict=True):
            each.host = buffer
        with copy_stream(self.device, after_compute=True):
            for each in storages:
                assert each.host is not None
                each.host.copy_(view_bytes(each.storage), non_blocking=True)

    def _storages_of(self, keys: Iterable[Key]) -> list[ManagedStorage]:
        return list({id(each): each for key in keys for each in self._parts[key]}.values())

    def _owner(self, storage: ManagedStorage) -> Key | None:
        """The part that the bytes of a storage count to."""
        return next((key for key in storage.users if key not in self._offloaded), None)

    def _drop(self, key: Key, address: int) -> None:
        storage = self._storages[address]
        del storage.users[key]
        if not storage.users:
            del self._storages[address]
            self._count(-storage.size if storage.resident else 0)

    def _count(self, more: int) -> None:
        self.used += more
        self.peak = max(self.peak, self.used)

    def _check(self, more: int, what: str) -> None:
        if self.limit is not None and self.used + more > self.limit:
            raise OutOfDeviceMemory(
                f"not enough device memory {what}: {_mib(more)} more than the {_mib(self.used)} in use exceed "
                f"{_mib(self.limit)} (runtime.device_memory). In use are\n{self.table()}"
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


BLOCK = 256 * 2**20  # bytes; a power of two, because torch rounds pinned memory up to one
ALIGNMENT = 64


def allocate_host(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Allocate one host buffer (u8[size]) for each size, cut from blocks of up to ``BLOCK`` bytes.

    A larger buffer has a block to itself. A block is freed together with the last buffer in it.
    """
    buffers: list[Tensor] = []
    for group in _group_by_block(sizes):
        block = torch.empty(sum(map(_align, group)), dtype=torch.uint8, pin_memory=pinned)
        start = 0
        for size in group:
            buffers.append(block[start : start + size])
            start += _align(size)
    return buffers


def measure_free_memory() -> int:
    """Return the bytes that this process may still take: the host's, or what its container leaves."""
    free, limit = psutil.virtual_memory().available, CGROUP / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return free
    used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    files = int(used["active_file"]) + int(used["inactive_file"])  # the page cache, which gives way
    return min(free, int(most) - int((CGROUP / "memory.current").read_text()) + files)


def release_free_heap() -> None:
    """Give the free pages of this process's heap back, if it has more memory than is left to it.

    Micro-batches of other lengths leave holes of other sizes. glibc keeps them, and after a hundred steps on a CPU they
    are more than a step needs. Pages that come back must be cleared again, so this waits until memory is short.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None and psutil.Process().memory_info().rss > measure_free_memory():
        trim(0)


def get_storage(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor; of a DTensor, that of this process's shard."""
    return getattr(tensor, "to_local", lambda: tensor)().untyped_storage()


def view_bytes(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a u8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def make_resizable(tensors: Iterable[Tensor]) -> None:
    """Move tensors to memory that torch can free, where they lie in a mapped file or in shared memory."""
    moved: dict[tuple[object, ...], Tensor] = {}
    for tensor in tensors:
        if not get_storage(tensor).resizable():
            source = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if source not in moved:
                moved[source] = tensor.detach().clone()
            tensor.data = moved[source]


def move_module(module: nn.Module, device: torch.device | str) -> None:
    """Move a module's parameters and buffers to ``device``; names that share a parameter still do.

    ``Module.to`` makes a parameter for each name, unless torch can exchange the memory of the old one: it can between
    the CPU and CUDA or XPU, and not on other devices.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    nn.Module.to(module, device)  # transformers wraps it without a usable signature
    for first, *others in names.values():
        for name in others:
            path, _, own = name.rpartition(".")
            module.get_submodule(path)._parameters[own] = module.get_parameter(first)


@contextmanager
def copy_stream(device: torch.device, *, after_compute: bool) -> Iterator[None]:
    """Run the copies of a block on a separate stream of ``device``, and wait for them at its end.

    They overlap with the computation on the device; with ``after_compute`` they start once the work queued so far is
    done. Copies within the host's memory are made at once.
    """
    if not is_accelerator(device):
        yield
        return
    with use_device(device):
        stream = torch.Stream(device)
        if after_compute:
            stream.wait_stream(torch.accelerator.current_stream(device))
        try:
            # Memory allocated inside belongs to this stream, so no copy waits for work of other streams.
            with stream:
                yield
        finally:
            stream.synchronize()


def _group_by_block(sizes: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    used = 0
    for size in sizes:
        if group and used + size > BLOCK:
            yield group
            group, used = [], 0
        group.append(size)
        used += _align(size)
    if group:
        yield group


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
