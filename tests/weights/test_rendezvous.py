"""Where ranks meet: on one interface, and with messages that run nothing."""

import socket

import pytest
from torch.distributed import TCPStore

from coalign.weights.sync import broadcast
from coalign.weights.sync.transport import open_store


def test_a_store_listens_on_the_chosen_interface_only():
    store = open_store("127.0.0.2")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)
    other = TCPStore("127.0.0.2", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_the_entries_of_a_bucket_are_json():
    sent = bytes(broadcast._to_bytes([["layer.weight", "bfloat16", (2, 3), 64, 2**63]]).tolist())
    assert sent == b'[["layer.weight", "bfloat16", [2, 3], 64, 9223372036854775808]]'
