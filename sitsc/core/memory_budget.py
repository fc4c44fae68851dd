"""What a plan needs of a device's memory, by component, and what there is.

In: a plan; bytes of a device, those free and a limit. Out: sums and texts. Asks no device.
"""

from dataclasses import dataclass

from sitsc.core.plan import Plan

TORCH_WORKSPACE_BYTES = 64 << 20
"""What torch allocates for its matrix library: 32 MiB on an H200, and rounding."""
CUDA_RUNTIME_BYTES = (768 << 20) + TORCH_WORKSPACE_BYTES
"""That, the CUDA context and all loaded code: 753 MB measured on an H200 after a first product."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a device: all, free (with what our context holds), the user's limit or 0."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """What this process may use in all."""
        return min(self.free_bytes, self.limit_bytes or self.free_bytes)


def components(plan: Plan) -> dict[str, int]:
    """Bytes needed on the device, by what they are for."""
    memory = plan.memory
    found = {
        "weights": memory.weights_bytes,
        "KV": memory.kv_bytes,
        "arena": memory.arena_bytes,
        "packages": memory.package_bytes,
        "graphs": memory.graph_bytes,
        "slack": memory.slack_bytes,
        "runtime": CUDA_RUNTIME_BYTES if plan.target.isa.startswith("sm_") else 0,
    }
    return {name: count for name, count in found.items() if count}


def needed_bytes(plan: Plan) -> int:
    """All bytes needed on the device."""
    return sum(components(plan).values())


def size_text(count: int) -> str:
    """Bytes in binary units: 14.96 GiB, 288.0 MiB."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
