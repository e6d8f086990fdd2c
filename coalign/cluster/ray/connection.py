"""The connection of this process to a Ray cluster: joining one, what a refusal says, and leaving it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated.node_manager_pb2 import GetNodeStatsRequest  # pyright: ignore[reportAttributeAccessIssue]: made at import
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

from coalign.cluster.ray.space import describe_open_cluster
from coalign.cluster.survivors.head import set_environment
from coalign.threads import start_thread

log = logging.getLogger(__name__)
CONNECT_SECONDS = 30.0  # how long a cluster that runs already may take to answer
ANSWER_SECONDS = 30.0  # how long a node may take to refuse a call without a token
LEAVE_SECONDS = 30.0  # how long Ray may take to end


def count_cluster_devices(address: str, resource: str) -> int:
    """Count the devices of the Ray cluster at ``address``, in use or not. ValueError if nothing answers there."""
    joined = ray.is_initialized()
    if not joined:
        connect(address)
    try:
        return int(ray.cluster_resources().get(resource, 0))
    finally:
        if not joined:
            ray.shutdown()


def connect(address: str | None) -> None:
    """Join the Ray cluster at ``address``; None: start one here."""
    set_environment()
    if address is not None:
        _wait_for_answer(address)
    try:
        ray.init(address=address or "local", include_dashboard=False, namespace="coalign")
    except ConnectionError as error:
        raise ValueError(f"runtime.ray_address: {_describe_refusal(address, error)}") from error
    if not _asks_for_token(find_own_node()):
        log.warning("%s", describe_open_cluster(address))


def _describe_refusal(address: str | None, error: ConnectionError) -> str:
    reason = str(error.__cause__ or error).strip()
    if "InvalidAuthToken" in reason:
        return (
            f"the Ray cluster at {address} asks for another token than the one here (RAY_AUTH_TOKEN, or "
            "~/.ray/auth_token, with RAY_AUTH_MODE=token); copy the file from its head node (docs/ports.md)"
        )
    return f"no Ray cluster answers at {address}: {reason.splitlines()[-1] if reason else error}"


def _wait_for_answer(address: str) -> None:
    """Refuse (ValueError) an address at which nothing answers in time: ``ray.init`` would wait for minutes, deaf to
    signals."""
    target = canonicalize_bootstrap_address(address.removeprefix("ray://"))
    if target is None or os.environ.get("RAY_USE_TLS") == "1":  # ray.init says what is missing; TLS needs certificates
        return
    with grpc.insecure_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise ValueError(
                f"runtime.ray_address: no Ray cluster answers at {address} ({target}) within {CONNECT_SECONDS:g} s. "
                "Does `ray status` work there, is the port that of `ray start --head` (6379 by default), and can this "
                "machine reach it?"
            ) from None


def _asks_for_token(node: Mapping[str, Any]) -> bool:
    """Whether a node refuses calls without a token; it is asked without one, whatever this process has."""
    with grpc.insecure_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        try:
            NodeManagerServiceStub(channel).GetNodeStats(GetNodeStatsRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError:
            return True
    return False


def end_in_time(end: Callable[[], None]) -> None:
    """End what runs on Ray, unless a raylet that does not answer keeps it from ending.

    Its processes then end with this one, as after `kill -9`. Killed now, the raylet would take this process with it.
    """
    ending = start_thread(end, "coalign-ray-end")
    ending.join(LEAVE_SECONDS)
    if ending.is_alive():
        message = "Ray did not end within %g s: its GCS or a raylet does not answer; it ends with this process"
        log.warning(message, LEAVE_SECONDS)
        atexit.unregister(ray.shutdown)  # it would wait again


def find_own_node() -> dict[str, Any]:
    """Ray's record of the node that this process is on."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == node_id)
