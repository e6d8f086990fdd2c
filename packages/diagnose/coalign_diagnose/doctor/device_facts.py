"""What is known of the devices of this machine: from torch, from nvidia-smi, and from the kernel's log."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field

import torch

MATRIX = 512  # rows and columns of the matrices that each device multiplies
COMMAND_SECONDS = 5.0  # how long nvidia-smi or dmesg may take
QUERY = ("index", "driver_version", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[\w:.]+)\): (?P<number>\d+)")


@dataclass(frozen=True)
class DeviceFacts:
    """A device that torch can use. Memory in bytes. ``problem``: why a small matrix product on it is wrong."""

    index: int
    name: str
    memory: int = 0
    free: int = 0
    problem: str = ""
    ecc_errors: int | None = None
    pages_pending: bool = False


@dataclass(frozen=True)
class AcceleratorFacts:
    """The devices of a machine: those of torch, how many nvidia-smi lists (None: it is not there), and its errors."""

    devices: tuple[DeviceFacts, ...] = ()
    listed: int | None = None
    driver: str = ""
    xids: tuple[tuple[str, int], ...] = ()  # (PCI bus, number), in the kernel's log since the machine started
    problem: str = ""  # why nvidia-smi says nothing


@dataclass
class _SmiRow:
    driver: str = ""
    ecc_errors: int | None = None
    pages_pending: bool = False


@dataclass
class _SmiTable:
    rows: dict[int, _SmiRow] = field(default_factory=dict)
    is_there: bool = False
    problem: str = ""


def measure_devices() -> AcceleratorFacts:
    """Measure the devices of this machine: a second or two for the first, and a short product on each."""
    table = _ask_nvidia_smi()
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = tuple(_measure_device(index, table) for index in range(count))
    return AcceleratorFacts(
        devices,
        len(table.rows) if table.is_there else None,
        next((row.driver for row in table.rows.values()), ""),
        read_xids(_run("dmesg") or "") if table.is_there else (),
        table.problem,
    )


def _measure_device(index: int, table: _SmiTable) -> DeviceFacts:
    row = table.rows.get(index, _SmiRow())
    device_type = str(torch.accelerator.current_accelerator())
    try:
        name = torch.get_device_module(device_type).get_device_name(index)
        free, total = torch.accelerator.get_memory_info(index)
        problem = _multiply(torch.device(device_type, index))
    except Exception as error:
        text = str(error).partition("\n")[0]
        return DeviceFacts(index, device_type, problem=f"{type(error).__name__}: {text}", ecc_errors=row.ecc_errors)
    return DeviceFacts(index, name, total, free, problem, row.ecc_errors, row.pages_pending)


def _multiply(device: torch.device) -> str:
    """Multiply small integers, whose products are exact in any float; return what is wrong."""
    left = torch.arange(MATRIX * MATRIX).reshape(MATRIX, MATRIX).remainder(5).float()
    right = left.T.contiguous()
    wrong = int(((left.to(device) @ right.to(device)).cpu() != left @ right).sum())
    return f"{wrong} of {MATRIX**2} numbers of a matrix product are wrong" if wrong else ""


def _ask_nvidia_smi() -> _SmiTable:
    if shutil.which("nvidia-smi") is None:
        return _SmiTable()
    text = _run("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    if text is None:
        return _SmiTable(is_there=True, problem=f"nvidia-smi fails, or takes over {COMMAND_SECONDS:g} s")
    return _SmiTable(read_smi_table(text), is_there=True)


def read_smi_table(text: str) -> dict[int, _SmiRow]:
    """Read what nvidia-smi prints for QUERY, by the device's index. What a device does not report is `[N/A]`."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY) and cells[0].isdecimal():
            errors = int(cells[2]) if cells[2].isdecimal() else None
            rows[int(cells[0])] = _SmiRow(cells[1], errors, cells[3] == "Yes")
    return rows


def read_xids(log: str) -> tuple[tuple[str, int], ...]:
    """Find the driver's errors in the kernel's log: (PCI bus, number), each once."""
    return tuple(dict.fromkeys((match["bus"], int(match["number"])) for match in XID.finditer(log)))


def _run(*command: str) -> str | None:
    """Return what a command prints; None if it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
