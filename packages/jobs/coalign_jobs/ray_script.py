"""Shell lines that raise a Ray cluster over the nodes of a job, for schedulers that only start processes."""

from __future__ import annotations

import json

from coalign.cluster.placement.nodes import ACCELERATORS
from coalign_jobs.cluster_size import ClusterSize

JOIN_SECONDS = 300  # how long nodes may take to join

# The function of the rendered scripts that starts Ray on a node and stays until it is ended. Ports: Ray's workers take
# free ones, since two jobs on one machine would compete for the same range.
RAISE_RAY = """\
# Whoever has the token runs code on the nodes: it is in the environment of this job alone.
export RAY_AUTH_MODE=token
# The network between the nodes, for Ray, NCCL and gloo: that of the default route, unless it is named.
export COALIGN_INTERFACE="${{GLOO_SOCKET_IFNAME:-$(ip -o -4 route show to default | awk '{{print $5; exit}}')}}"
if [ -n "$COALIGN_INTERFACE" ]; then
  export GLOO_SOCKET_IFNAME=$COALIGN_INTERFACE NCCL_SOCKET_IFNAME=${{NCCL_SOCKET_IFNAME:-$COALIGN_INTERFACE}}
fi

own_address() {{  # of this node, on the network between the nodes
  if [ -n "$COALIGN_INTERFACE" ]; then
    ip -4 -o addr show dev "$COALIGN_INTERFACE" | awk '{{split($4, a, "/"); print a[1]; exit}}'
  else
    hostname -I | awk '{{print $1}}'
  fi
}}

start_ray() {{  # as `head` or `worker`: Ray on this node, until it is ended
  if [ "$1" = head ]; then
    set -- --head --port="$RAY_PORT" --ray-client-server-port="$((RAY_PORT + 1))" --temp-dir="$RAY_FILES" \\
      --include-dashboard=false
  else
    for _ in $(seq {seconds}); do (exec 3<>"/dev/tcp/$RAY_HEAD/$RAY_PORT") 2>/dev/null && break; sleep 1; done
    set -- --address="$RAY_HEAD:$RAY_PORT"
  fi
  exec {ray} start "$@" --node-ip-address="$(own_address)" {resources} \\
    --min-worker-port=0 --max-worker-port=0 --block
}}

wait_for_nodes() {{  # until all have joined the head, which is the process $head
  for _ in $(seq {tries}); do
    kill -0 "$head" 2>/dev/null || {{ echo "coalign: Ray has not started, see above" >&2; return 1; }}
    [ "$({ray} status --address="$RAY_HEAD:$RAY_PORT" 2>/dev/null | grep -c ' node_')" -ge {nodes} ] && return 0
    sleep 2
  done
  echo "coalign: fewer than {nodes} nodes joined Ray at $RAY_HEAD:$RAY_PORT within {seconds} s" >&2
  return 1
}}
"""


def raise_ray(size: ClusterSize, ray: str) -> str:
    """Return the shell functions ``start_ray head|worker`` and ``wait_for_nodes``; ``ray`` is the program.

    They read RAY_HEAD, RAY_PORT, RAY_FILES (a short path: it holds sockets) and RAY_AUTH_TOKEN.
    """
    return RAISE_RAY.format(
        ray=ray, resources=name_resources(size), nodes=size.nodes, seconds=JOIN_SECONDS, tries=JOIN_SECONDS // 2
    )


def name_resources(size: ClusterSize) -> str:
    """Return the options of `ray start` that say which devices a node has."""
    if size.resource == "GPU":
        return f"--num-gpus={size.devices}"
    if not size.devices or size.resource in ACCELERATORS:
        return "--num-gpus=0"  # Ray finds other accelerators by itself
    return f"--num-gpus=0 --resources='{json.dumps({size.resource: size.devices})}'"
