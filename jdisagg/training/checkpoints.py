"""Orbax checkpoints of a run: weights and optimiser state as flat lists, the newest two kept."""

from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp

from jdisagg.training.step import Leaves

KEPT = 2


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, enable_async_checkpointing=False)
        self._store = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, leaves: Leaves, state: optax.OptState) -> None:
        """Writes what the run needs to go on after `step` steps."""
        tree = {"leaves": leaves, "optimiser": jax.tree.leaves(state)}
        self._store.save(step, args=ocp.args.StandardSave(tree), force=True)
        self._store.wait_until_finished()

    def latest_step(self) -> int | None:
        return self._store.latest_step()

    def restore(self, step: int, leaves: Leaves, state: optax.OptState) -> tuple[Leaves, optax.OptState]:
        """Reads `step` into the shapes of `leaves` and `state`, whose values are not used."""
        parts, tree = jax.tree.flatten(state)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"leaves": leaves, "optimiser": parts})
        read = self._store.restore(step, args=ocp.args.StandardRestore(shapes))
        return list(read["leaves"]), jax.tree.unflatten(tree, read["optimiser"])

    def close(self) -> None:
        self._store.close()
