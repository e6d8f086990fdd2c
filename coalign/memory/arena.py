"""The device memory that models keep between calls: who has how much of it, and its way to the host and back.

What moves is a storage, not a tensor. Whatever views it (an engine that computes with the trainer's weights, tied
weights, the flat shards of FSDP) sees it leave and come back without being told, and nothing is stored twice. On a
machine without devices the arena stands for one: the same code moves the same storages between two places in the host's
memory, under a limit that holds as a device's size would.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from coalign.memory.copying import copying, give_back, host_space, own, raw, storage_of

PARTS = ("weights", "gradients", "optimizer", "kv")
Key = tuple[str, str]  # (model, part)


class OutOfDeviceMemory(MemoryError):
    """There is no room on the device; says who has it."""


@dataclass(slots=True)
class ManagedStorage:
    """One storage of ``size`` bytes, the parts that use it in the order in which they came, and its place on the host
    (u8[size]), which it keeps once it has one."""

    storage: UntypedStorage
    size: int
    users: dict[Key, None] = field(default_factory=dict)
    host: Tensor | None = None
    saved: bool = False  # the host has what the device has
    here: bool = True


class Arena:
    """What the models of one process keep on one ``device``.

    A part of a model is here or away. A storage that several parts use is here as long as one of them is, and counts to
    the first of those. ``limit``: bytes that all may have together (None: the device decides). ``peak``: the most that
    they had since ``begin``. Activations are not counted, nor what lies elsewhere.
    """

    def __init__(self, device: str, limit: int | None = None) -> None:
        self.device = torch.device(device)
        self.limit = limit
        self.used = self.peak = 0
        # By the address of the storage's record, which stays when the bytes go.
        self._pieces: dict[int, ManagedStorage] = {}
        self._parts: dict[Key, list[ManagedStorage]] = {}
        self._away: set[Key] = set()
        self._reserved: dict[Key, int] = {}
        self._books = threading.RLock()  # never held while bytes move
        self._moving = threading.Lock()

    # ---- the books -------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Measure ``peak`` from now on; the bytes that are used now."""
        with self._books:
            self.peak = self.used
            return self.used

    def settle(self, model: str, part: str, tensors: Iterable[Tensor]) -> None:
        """These are the tensors of a part now: what is new is on the device, what nobody uses any more is forgotten.

        Raises OutOfDeviceMemory if all together are more than the limit.
        """
        tensors, key = [t for t in tensors if t.device.type == self.device.type], (model, part)
        own(tensors)
        found = {storage._cdata: storage for storage in map(storage_of, tensors)}
        with self._books:
            for address in [a for a, piece in self._pieces.items() if key in piece.users and a not in found]:
                self._drop(key, address)
            for address, storage in found.items():
                if address not in self._pieces:
                    self._pieces[address] = ManagedStorage(storage, storage.nbytes())
                    self._count(storage.nbytes())
                if key not in self._pieces[address].users:
                    self._pieces[address].users[key] = None
                    self._pieces[address].saved = False  # whoever came may write to it
            self._parts[key] = [self._pieces[address] for address in found]
            self._check(0, f"with the {part} of '{model}'")

    def reserve(self, model: str, part: str, size: int) -> None:
        """The model has ``size`` bytes of this part that no call of ``settle`` lists, or is about to have (0: no more).

        Raises OutOfDeviceMemory if there is no room for them; nothing has changed then.
        """
        with self._books:
            more = size - self._reserved.get((model, part), 0)
            self._check(more, f"for the {part} of '{model}'")
            self._count(more)
            self._reserved[model, part] = size

    def held(self, model: str) -> dict[str, int]:
        """Bytes on the device of each part of a model that is here; 0 where all of it counts to others."""
        sizes = {}
        with self._books:
            for key in ((model, part) for part in PARTS):
                if self._reserved.get(key) or (self._parts.get(key) and key not in self._away):
                    paid = sum(piece.size for piece in self._parts.get(key, ()) if self._payer(piece) == key)
                    sizes[key[1]] = paid + self._reserved.get(key, 0)
        return sizes

    def away(self, model: str) -> dict[str, int]:
        """The parts of a model that are away, and the bytes that would have to come for each."""
        with self._books:
            mine = [key for key in self._away if key[0] == model]
            return {key[1]: sum(piece.size for piece in self._parts[key] if not piece.here) for key in mine}

    def models(self) -> list[str]:
        """Everybody who is known here."""
        with self._books:
            return list(dict.fromkeys(model for model, _ in (*self._parts, *self._reserved)))

    def require(self, model: str, parts: Iterable[str], what: str) -> None:
        """Raises RuntimeError unless these parts are here: to compute with what is away would end the process."""
        if missing := [part for part in parts if (model, part) in self._away]:
            raise RuntimeError(f"{what} needs {' and '.join(missing)} of '{model}' on the device; they are on the host")

    def table(self) -> str:
        """Who has how much on the device, the largest first."""
        rows = [(size, f"{model}: {part}") for model in self.models() for part, size in self.held(model).items()]
        return "\n".join(f"{_mib(size):>14}  {name}" for size, name in sorted(rows, reverse=True))

    # ---- moving ----------------------------------------------------------------------------------------------------

    def leave(self, model: str, parts: Sequence[str], *, constant: Sequence[str] = ()) -> int:
        """Take parts to the host; the bytes that left. Those that are ``constant`` are copied the first time only.

        An error leaves all of it on the device.
        """
        with self._moving:
            keys = [
                (model, part) for part in parts if self._parts.get((model, part)) and (model, part) not in self._away
            ]
            going = [piece for piece in self._of(keys) if piece.here and piece.users.keys() <= {*keys, *self._away}]
            self._save([piece for piece in going if not piece.saved])
            unchanging = {(model, part) for part in constant}
            with self._books:
                for piece in going:
                    piece.storage.resize_(0)
                    piece.here, piece.saved = False, piece.users.keys() <= unchanging
                    self._count(-piece.size)
                self._away.update(keys)
            give_back(self.device)
            return sum(piece.size for piece in going)

    def enter(self, model: str, parts: Sequence[str]) -> int:
        """Take parts to the device; the bytes that came.

        Raises OutOfDeviceMemory before anything has moved. After any other error the parts are still away, and another
        call goes on with what has not come yet.
        """
        with self._moving:
            keys = [(model, part) for part in parts if (model, part) in self._away]
            coming = [piece for piece in self._of(keys) if not piece.here]
            size = sum(piece.size for piece in coming)
            with self._books:
                self._check(size, f"for the {' and '.join(part for _, part in keys)} of '{model}'")
            with copying(self.device, after_compute=False):
                for piece in coming:
                    piece.storage.resize_(piece.size)
                    raw(piece.storage).copy_(piece.host, non_blocking=True)
                    with self._books:
                        piece.here = True
                        self._count(piece.size)
            self._away.difference_update(keys)
            return size

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _save(self, pieces: list[ManagedStorage]) -> None:
        """Copy to the host."""
        new = [piece for piece in pieces if piece.host is None]
        space = host_space([piece.size for piece in new], pinned=self.device.type == "cuda")
        for piece, host in zip(new, space, strict=True):
            piece.host = host
        with copying(self.device, after_compute=True):
            for piece in pieces:
                piece.host.copy_(raw(piece.storage), non_blocking=True)

    def _of(self, keys: Iterable[Key]) -> list[ManagedStorage]:
        """The pieces of some parts, each once."""
        return list({id(piece): piece for key in keys for piece in self._parts[key]}.values())

    def _payer(self, piece: ManagedStorage) -> Key | None:
        return next((key for key in piece.users if key not in self._away), None)

    def _drop(self, key: Key, address: int) -> None:
        piece = self._pieces[address]
        del piece.users[key]
        if not piece.users:
            del self._pieces[address]
            self._count(-piece.size if piece.here else 0)

    def _count(self, more: int) -> None:
        self.used += more
        self.peak = max(self.peak, self.used)

    def _check(self, more: int, what: str) -> None:
        if self.limit is not None and self.used + more > self.limit:
            raise OutOfDeviceMemory(
                f"no room {what}: {_mib(more)} more than the {_mib(self.used)} in use, and the device has "
                f"{_mib(self.limit)} (runtime.device_memory). In use are\n{self.table()}"
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
