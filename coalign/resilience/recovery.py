"""Recovers a run whose loop has met a lost process.

::

    loop ──WorkerLost──► end calls ──► start lost processes again ──► reconnect syncs
                          ▲                 │                              │
                          │                 │ runtime.restarts is used up  │
             another loss │                 ▼                              ▼
                          │               ended          trainers live, no step was under way?
                          │                 ▲              │ yes                       │ no, or samples were lost, too
                          │                 │              ▼                           ▼
                          │                 │     last step's snapshot      newest checkpoint, in memory or on disk
                          │                 │              │                    │ none              │
                          │                 │ ◄────────────┼────────────────────┘                   ▼
                          └─────────────────┼──────────────┤                        samples, weights and position of it
                                            │              ▼                                        │
              third loss in one step ───────┘            loop ◄─────────────────────────────────────┘

Who answers which loss:

- A replica that generates in slices, a scorer or the worker of functions: the cluster starts it again and makes its
  calls once more (coalign.cluster.slices, `Cluster.launch`). The loop hears nothing.
- Every other process, and a batch that was stored on a lost node: the loop calls `Recovery.recover`.
- A node: its processes are lost, and start again on another node (coalign.cluster.ray.ray_devices).
- The driver: the next one takes the processes over (coalign.cluster.survivors), and goes on from the newest checkpoint
  (coalign.checkpoint.resume).
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress

from coalign.checkpoint.resume import RunStores, find_distant_model, find_newest, rewind_engine
from coalign.cluster.future import PayloadLost, WorkerLost
from coalign.cluster.slices import MAX_LOSSES
from coalign.engine.engine import Engine
from coalign.engine.hooks.run_folder import RunFolder

log = logging.getLogger(__name__)


class Recovery:
    """Takes an engine back to its last step, or to a checkpoint in ``stores``, after processes were lost."""

    def __init__(self, engine: Engine, stores: RunStores, folder: RunFolder) -> None:
        self.engine, self.stores, self.folder = engine, stores, folder
        self._losses = Counter[int]()  # step -> how often processes were lost in it

    def recover(self, lost: WorkerLost) -> None:
        """Recover from lost processes, also if more are lost meanwhile.

        Raises the last WorkerLost if there is no saved state, or if a step loses processes MAX_LOSSES times.
        """
        while True:
            self.engine.phase("restart")
            self._losses[self.engine.step] += 1
            if self._losses[self.engine.step] == MAX_LOSSES:
                raise lost
            try:
                if self._start_again(lost):
                    return
            except WorkerLost as another:
                lost = another
            else:
                raise lost

    def _start_again(self, lost: WorkerLost) -> bool:
        """Start lost processes again, and return to the last step or to a checkpoint; return whether there was one.

        Raises WorkerLost.
        """
        engine = self.engine
        engine.cluster.end_calls(lost)
        trainers_live = not engine.cluster.replace_lost(lost).intersection(engine.learning)
        engine.training.reconnect()
        if (state := engine.progress.consistent_state) is not None and trainers_live:
            with suppress(PayloadLost):  # samples that wait were lost, too
                engine.return_to(state)
                engine.training.sync(engine.step)
                return True
        step = engine.step
        engine.progress.keep_state(None)  # until a checkpoint is loaded: trained models may be new
        if not self._load_newest():
            return False
        engine.progress.keep_state(engine.snapshot())
        if engine.step < step:
            engine.pending_notifications.clear()  # their step is trained again
        return True

    def _load_newest(self) -> bool:
        """Load the newest checkpoint that all ranks of trained models can read; return whether there was one."""
        disk, memory = self.stores.disk, self.stores.memory
        for folder in (memory, disk):
            with suppress(Exception):  # the lost process may have been writing
                folder.settle()
        newest = find_newest([disk] if find_distant_model(self.engine) else [disk, memory])
        if newest is None:
            return False
        lost = self.engine.step
        rewind_engine(self.engine, newest, repeat=True)
        self.folder.cut(self.engine.step)
        log.warning("continuing from %s; step %d is made again", newest, min(lost, self.engine.step) + 1)
        return True
