"""Accounting of the device memory that models keep between calls, and its offload to the host and back.

A storage moves, not a tensor. Every tensor that views a storage (a generator that shares the trainer's weights,
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
Key = tuple[str, str]  # (model, component)


class OutOfDeviceMemory(MemoryError):
    """The device memory limit is reached. The message lists who uses how much."""


@dataclass(slots=True)
class _ManagedStorage:
    """A storage of ``size`` bytes, its users in order of registration, and its host buffer (u8[size]), if any."""

    storage: UntypedStorage
    size: int
    users: dict[Key, None] = field(default_factory=dict)
    host: Tensor | None = None
    saved: bool = False  # the host buffer equals the device's bytes
    resident: bool = True  # on the device


class Arena:
    """The memory that the models of one process keep on one ``device``.

    A component of a model is either on the device or offloaded. A storage that several components use stays on the
    device as long as one of them does, and counts to the first of those. ``limit``: bytes of all components together
    (None: no limit but the device's own). ``peak``: the most bytes in use since ``begin``. Activations are not
    counted, nor tensors on other devices.
    """

    def __init__(self, device: str, limit: int | None = None) -> None:
        self.device = torch.device(device)
        self.limit = limit
        self.used = self.peak = 0
        # By the address of the storage's record, which does not change when its bytes are freed.
        self._storages: dict[int, _ManagedStorage] = {}
        self._components: dict[Key, list[_ManagedStorage]] = {}
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

    def settle(self, model: str, component: str, tensors: Iterable[Tensor]) -> None:
        """Set the tensors of a component: new ones are counted, those that are no longer listed are forgotten.

        Raises OutOfDeviceMemory if the total exceeds the limit.
        """
        tensors, key = [t for t in tensors if t.device.type == self.device.type], (model, component)
        _make_resizable(tensors)
        storages = {storage._cdata: storage for storage in map(get_storage, tensors)}
        with self._books:
            for address in [a for a, managed in self._storages.items() if key in managed.users and a not in storages]:
                self._drop(key, address)
            for address, storage in storages.items():
                if address not in self._storages:
                    self._storages[address] = _ManagedStorage(storage, storage.nbytes())
                    self._count(storage.nbytes())
                if key not in self._storages[address].users:
                    self._storages[address].users[key] = None
                    self._storages[address].saved = False  # the new user may write to it
            self._components[key] = [self._storages[address] for address in storages]
            self._check(0, f"with the {component} of '{model}'")

    def reserve(self, model: str, component: str, size: int) -> None:
        """Count ``size`` bytes of a component whose tensors ``settle`` does not list; 0 ends the reservation.

        Raises OutOfDeviceMemory if they exceed the limit; nothing has changed then.
        """
        with self._books:
            more = size - self._reserved.get((model, component), 0)
            self._check(more, f"for the {component} of '{model}'")
            self._count(more)
            self._reserved[model, component] = size

    def list_resident(self, model: str) -> dict[str, int]:
        """Return the bytes of each component of a model on the device; 0 where others count all of its storages."""
        sizes = {}
        with self._books:
            for key in ((model, component) for component in PARTS):
                if self._reserved.get(key) or (self._components.get(key) and key not in self._offloaded):
                    counted = [s.size for s in self._components.get(key, ()) if self._owner(s) == key]
                    sizes[key[1]] = sum(counted) + self._reserved.get(key, 0)
        return sizes

    def list_offloaded(self, model: str) -> dict[str, int]:
        """Return the offloaded components of a model, each with the bytes that ``reload`` would bring to the device."""
        with self._books:
            keys = [key for key in self._offloaded if key[0] == model]
            return {key[1]: sum(s.size for s in self._components[key] if not s.resident) for key in keys}

    def models(self) -> list[str]:
        """Return the names of all models that have or had memory here."""
        with self._books:
            return list(dict.fromkeys(model for model, _ in (*self._components, *self._reserved)))

    def require(self, model: str, components: Iterable[str], what: str) -> None:
        """Raise RuntimeError unless these are on the device: a kernel on freed memory would kill the process."""
        if missing := [component for component in components if (model, component) in self._offloaded]:
            raise RuntimeError(f"{what} needs {' and '.join(missing)} of '{model}' on the device; they are on the host")

    def table(self) -> str:
        """List the bytes of each component on the device, the largest first."""
        sizes = {model: self.list_resident(model) for model in self.models()}
        rows = [(size, f"{model}: {name}") for model, by_name in sizes.items() for name, size in by_name.items()]
        return "\n".join(f"{_mib(size):>14}  {name}" for size, name in sorted(rows, reverse=True))

    # ---- offload and reload ----------------------------------------------------------------------------------------

    def offload(self, model: str, components: Sequence[str], *, constant: Sequence[str] = ()) -> int:
        """Offload components to the host. Returns the bytes freed. ``constant`` ones are copied the first time only.

        After an error all of them are still on the device.
        """
        with self._moving:
            keys = [
                (model, component)
                for component in components
                if self._components.get((model, component)) and (model, component) not in self._offloaded
            ]
            going = [
                managed
                for managed in self._storages_of(keys)
                if managed.resident and managed.users.keys() <= {*keys, *self._offloaded}
            ]
            self._save([managed for managed in going if not managed.saved])
            unchanging = {(model, component) for component in constant}
            with self._books:
                for managed in going:
                    managed.storage.resize_(0)
                    managed.resident, managed.saved = False, managed.users.keys() <= unchanging
                    self._count(-managed.size)
                self._offloaded.update(keys)
            if is_accelerator(self.device):  # other processes can have it
                with use_device(self.device):
                    torch.accelerator.empty_cache()
            return sum(managed.size for managed in going)

    def reload(self, model: str, components: Sequence[str]) -> int:
        """Bring offloaded components back to the device. Returns the bytes copied.

        Raises OutOfDeviceMemory before anything has moved. After any other error they still count as offloaded, and
        another call copies the rest.
        """
        with self._moving:
            keys = [(model, component) for component in components if (model, component) in self._offloaded]
            coming = [managed for managed in self._storages_of(keys) if not managed.resident]
            size = sum(managed.size for managed in coming)
            with self._books:
                self._check(size, f"for the {' and '.join(component for _, component in keys)} of '{model}'")
            with _copy_stream(self.device, after_compute=False):
                for managed in coming:
                    assert managed.host is not None, "an offloaded storage has a copy on the host"
                    managed.storage.resize_(managed.size)
                    _view_bytes(managed.storage).copy_(managed.host, non_blocking=True)
                    with self._books:
                        managed.resident = True
                        self._count(managed.size)
            self._offloaded.difference_update(keys)
            return size

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _save(self, storages: list[_ManagedStorage]) -> None:
        """Copy storages to their host buffers, which are allocated the first time and then kept."""
        new = [managed for managed in storages if managed.host is None]
        buffers = _allocate_host([managed.size for managed in new], pinned=is_accelerator(self.device))
        for managed, buffer in zip(new, buffers, strict=True):
            managed.host = buffer
        with _copy_stream(self.device, after_compute=True):
            for managed in storages:
                assert managed.host is not None
                managed.host.copy_(_view_bytes(managed.storage), non_blocking=True)

    def _storages_of(self, keys: Iterable[Key]) -> list[_ManagedStorage]:
        return list({id(s): s for key in keys for s in self._components[key]}.values())

    def _owner(self, storage: _ManagedStorage) -> Key | None:
        """The component that the bytes of a storage count to."""
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


def _allocate_host(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
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
    if not limit.is_file() or (limit_text := limit.read_text().strip()) == "max":
        return free
    used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    files = int(used["active_file"]) + int(used["inactive_file"])  # the page cache, which gives way
    return min(free, int(limit_text) - int((CGROUP / "memory.current").read_text()) + files)


def release_free_heap() -> None:
    """Give the free pages of this process's heap back, if it has more memory than is left to it.

    Micro-batches of other lengths leave holes of other sizes. glibc keeps them, and after a hundred steps on a CPU they
    are more than a step needs. Pages that come back must be cleared again, so this waits until memory is short.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None and psutil.Process().memory_info().rss > measure_free_memory():
        trim(0)


def get_storage(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor; of a DTensor, that of this process's shard."""
    return getattr(tensor, "to_local", lambda: tensor)().untyped_storage()


def _view_bytes(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a u8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _make_resizable(tensors: Iterable[Tensor]) -> None:
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
    for first, *copies in names.values():
        for name in copies:
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path)._parameters[attribute] = module.get_parameter(first)


@contextmanager
def _copy_stream(device: torch.device, *, after_compute: bool) -> Iterator[None]:
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
